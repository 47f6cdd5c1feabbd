// dpairs_ij = Γ_ij · dt_j · (dy_i·x_j) for j ≤ i, which multiplies C_i·B_j, and for each token t
// near = Σ_{i ≥ t > j} pairs_ij · dpairs_ij.
//
// x, dy (rows, heads of all · head_dim), tokens, pairs as common/mamba_chunks.wgsl has them; dpairs (heads of a
// group, rows, groups of the launch, CHUNK) and near (rows, heads, blocks), the sum over the tokens i of each
// workgroup, are overwritten up to the workgroup's last token. Γ_ij is a sum of decays one by one.
// Launcher: kernels/mamba_chunks.py.
//#include common/mamba_chunks.wgsl

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 tokens: 8 float32 texture
//#input 2 pairs: 8 float32 texture
//#input 3 x: 8 texture
//#input 4 dy: 8 texture
//#output 5 dpairs: 8 float32
@group(0) @binding(6) var<storage, read_write> near: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let first = group.x * (SETS * THREADS) / CHUNK * CHUNK;
    let begin = group.x * (SETS * THREADS) - first;
    if (first + begin >= params.seq) {
        return;
    }
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let own_at = (params.first_head + group.y) * params.head_units;
    let in_group = (params.first_head + group.y) / params.group;
    let groups = params.c_at / params.state_units;
    let members = min(params.group, params.heads);
    let rows = grid.z * params.seq;
    let tiles = min(begin + SETS * THREADS, count + 7u) / 8u;
    //#unroll b SETS
        let i_$b = begin + $bu * THREADS + local.x;
        let row_$b = row0 + min(i_$b, count - 1u);
        let counts_$b = select(0.0, high(load_tokens(row_$b * params.heads + group.y)).x, i_$b < count);
        let pairs_at_$b = (row_$b * groups + in_group) * (CHUNK / 8u);
        let dpairs_at_$b = ((group.y % members * rows + row_$b) * (params.heads / members) + group.y / members) * (CHUNK / 8u);
        var sum_$b = 0.0;
        var across_$b = 0.0;
        // Sums of decays after each eight tokens.
        var after_$b: array<f32, CHUNK / 8u>;
    //#end
    for (var left = tiles; left > 0u; left -= 1u) {
        let j0 = 8u * (left - 1u);
        //#unroll b SETS: after_$b[left - 1u] = sum_$b;
        //#unroll p BLOCKS: let log_$p = low(load_tokens((row0 + min(j0 + $pu * SPAN + local.x % SPAN, count - 1u)) * params.heads + group.y)).x;
        //#unroll p BLOCKS, s SPAN
            let a_$p_$s = subgroupBroadcast(log_$p, $su);
            //#unroll b SETS: sum_$b += select(0.0, a_$p_$s, j0 + $pu * SPAN + $su <= min(i_$b, count - 1u));
        //#end
    }
    for (var tile = 0u; tile < tiles; tile += 1u) {
        let j0 = 8u * tile;
        //#unroll b SETS
            var products_$b: array<f32, 8>;
            var gamma_$b: array<f32, 8>;
            //#unroll k 8: products_$b[$k] = 0.0;
            sum_$b = after_$b[tile];
        //#end
        //#unroll p BLOCKS
            let t_$p = j0 + $pu * SPAN + local.x % SPAN;
            let at_$p = row0 + min(t_$p, count - 1u);
            let token_$p = low(load_tokens(at_$p * params.heads + group.y));
            let size_$p = select(0.0, token_$p.y, t_$p < count);
            let x_at_$p = at_$p * params.head_stride + own_at;
        //#end
        var logs: array<f32, 8>;
        //#unroll p BLOCKS, s SPAN: logs[$p * SPAN + $s] = subgroupBroadcast(token_$p.x, $su);
        //#unroll k 8, b SETS
            let is_near_$k_$b = j0 + 7u - $ku <= min(i_$b, count - 1u);
            gamma_$b[7 - $k] = select(0.0, kept(sum_$b), is_near_$k_$b);
            sum_$b += select(0.0, logs[7 - $k], is_near_$k_$b);
        //#end
        for (var q = 0u; q < params.head_units; q += 1u) {
            //#unroll b SETS: let dy_$b = load_dy(row_$b * params.head_stride + own_at + q);
            //#unroll p BLOCKS: let x_$p = load_x(x_at_$p + q);
            //#unroll p BLOCKS, s SPAN
                let v_$p_$s = broadcast_x_$s(x_$p);
                //#unroll b SETS: products_$b[$p * SPAN + $s] += tree8(dy_$b, v_$p_$s);
            //#end
        }
        //#unroll b SETS: let pairs_$b = load_pairs(pairs_at_$b + tile);
        //#unroll p BLOCKS
            var own_$p = 0.0;
            //#unroll s SPAN
                let size_$p_$s = subgroupBroadcast(size_$p, $su);
                var sum_$p_$s = 0.0;
                //#unroll b SETS
                    gamma_$b[$p * SPAN + $s] *= counts_$b * size_$p_$s * products_$b[$p * SPAN + $s];
                    sum_$p_$s += select(0.0, across_$b, j0 + $pu * SPAN + $su <= i_$b);
                    across_$b += element(pairs_$b, $pu * SPAN + $su) * gamma_$b[$p * SPAN + $s];
                //#end
                let all_$p_$s = subgroupAdd(sum_$p_$s);
                own_$p = select(own_$p, all_$p_$s, local.x == $su);
            //#end
            let told_$p = j0 + $pu * SPAN + local.x;
            if (local.x < SPAN && told_$p < count) {
                near[((row0 + told_$p) * params.heads + group.y) * (CHUNK / (SETS * THREADS)) + begin / (SETS * THREADS)] = own_$p;
            }
        //#end
        //#unroll b SETS: if (i_$b < count) { store_dpairs(dpairs_at_$b + tile, eight_of(gamma_$b)); }
    }
}

//#include common/eight_of.wgsl
//#include common/tree8.wgsl
