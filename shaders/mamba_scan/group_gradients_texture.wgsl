// dC_i = Σ_heads into_i · S·dy_i + Σ_{j ≤ i} dpairs_ij · B_j; or (REVERSE)
// dB_j = Σ_heads dt_j · out of_j · dS·x_j + Σ_{i ≥ j} dpairs_ij · C_i,
// over the heads of the launch that share B and C, and for each of them and each workgroup's rows of a state
// far = C_i · into_i · S·dy_i, or B_j · out of_j · dS·x_j.
//
// tokens, states, bc as common/mamba_chunks.wgsl has them; values, which are dy or x (rows, heads of all ·
// head_dim), and dpairs (rows, groups of the launch · CHUNK), summed over heads, are read; dbc, like bc, float32,
// is overwritten or (ACCUMULATE) added to, far (rows, heads, tiles) overwritten. A workgroup has two units of its
// tokens' columns of dC or dB. Launcher: kernels/mamba_chunks.py.
//#include common/mamba_chunks.wgsl

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 tokens: 8 float32 texture
//#input 2 states: 8 float32 texture
//#input 3 bc: 8 texture
//#input 4 values: 8 texture
//#if REVERSE
//#input 5 dpairs: 1 float32 texture
//#else
//#input 5 dpairs: 8 float32 texture
//#endif
//#output 6 dbc: 8 sum
@group(0) @binding(7) var<storage, read_write> far: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let across = (params.state_units + 1u) / 2u;
    let tile = group.x % across;
    let block = group.x / across;
    let first = block * (SETS * THREADS) / CHUNK * CHUNK;
    let begin = block * (SETS * THREADS) - first;
    if (first + begin >= params.seq) {
        return;
    }
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let members = min(params.group, params.heads);
    let groups = params.heads / members;
    let member0 = group.y * members;
    let unit = 2u * tile;
    let last = params.state_units - 1u;
    let has_second = unit < last;
    let group_at = (params.first_head + member0) / params.group * params.state_units + unit;
    let own_at = group_at + select(params.c_at, 0u, REVERSE);
    let other_at = group_at + select(0u, params.c_at, REVERSE);
    let next = select(0u, 1u, has_second);
    //#unroll b SETS
        let i_$b = begin + $bu * THREADS + local.x;
        let row_$b = row0 + min(i_$b, count - 1u);
        let at_$b = row_$b * params.state_stride + own_at;
        let own_$b_0 = load_bc(at_$b);
        let own_$b_1 = scale8(load_bc(at_$b + next), f32(next));
        var all_$b_0 = zero8();
        var all_$b_1 = zero8();
    //#end
    for (var member = member0; member < member0 + members; member += 1u) {
        let state_at = first_unit_of_state(group.z, member, first / CHUNK);
        let values_at = (params.first_head + member) * params.head_units;
        //#unroll c 2, p BLOCKS: let state_$c_$p = state_at + (8u * min(unit + $cu, last) + $pu * SPAN + local.x % SPAN) * params.head_units;
        //#unroll b SETS, c 2
            var told_$b_$c: array<f32, 8>;
            //#unroll k 8: told_$b_$c[$k] = 0.0;
        //#end
        for (var q = 0u; q < params.head_units; q += 1u) {
            //#unroll b SETS: let value_$b = load_values(row_$b * params.head_stride + values_at + q);
            //#unroll c 2, p BLOCKS: let rows_$c_$p = load_states(state_$c_$p + q);
            //#unroll c 2, p BLOCKS, s SPAN
                let v_$c_$p_$s = broadcast_states_$s(rows_$c_$p);
                //#unroll b SETS: told_$b_$c[$p * SPAN + $s] += tree8(value_$b, v_$c_$p_$s);
            //#end
        }
        //#unroll b SETS
            let weights_$b = low(load_tokens(row_$b * params.heads + member));
            let factor_$b = select(weights_$b.z, weights_$b.w, REVERSE);
            let size_$b = select(1.0, weights_$b.y, REVERSE);
            //#unroll c 2
                let given_$b_$c = scale8(eight_of(told_$b_$c), factor_$b);
                all_$b_$c = add_scaled8(all_$b_$c, size_$b, given_$b_$c);
            //#end
            if (i_$b < count) {
                far[(row_$b * params.heads + member) * across + tile] = dot8(own_$b_0, given_$b_0) + dot8(own_$b_1, given_$b_1);
            }
        //#end
    }
    let pairs_at = group.y * CHUNK;
//#if REVERSE
    for (var j0 = begin; j0 < count; j0 += 8u) {
//#else
    for (var j0 = 0u; j0 < min(begin + SETS * THREADS, count); j0 += 8u) {
        //#unroll b SETS: let pairs_$b = load_dpairs((row_$b * groups * CHUNK + pairs_at + j0) / 8u);
//#endif
        //#unroll p BLOCKS
            let t_$p = row0 + min(j0 + $pu * SPAN + local.x % SPAN, count - 1u);
            //#unroll c 2: let bc_$p_$c = load_bc(t_$p * params.state_stride + other_at + $cu * next);
        //#end
        //#unroll p BLOCKS, s SPAN
            let j_$p_$s = j0 + $pu * SPAN + $su;
            //#unroll b SETS
//#if REVERSE
                let pair_$b_$p_$s = select(0.0, load_dpairs((row0 + min(j_$p_$s, count - 1u)) * groups * CHUNK + pairs_at + min(i_$b, count - 1u)), j_$p_$s < count);
//#else
                let pair_$b_$p_$s = select(0.0, element(pairs_$b, $pu * SPAN + $su), j_$p_$s < count);
//#endif
            //#end
            //#unroll c 2
                let v_$p_$s_$c = broadcast_bc_$s(bc_$p_$c);
                //#unroll b SETS: all_$b_$c = add_scaled8(all_$b_$c, pair_$b_$p_$s, v_$p_$s_$c);
            //#end
        //#end
    }
    //#unroll b SETS
        if (i_$b < count) {
            store_dbc(at_$b, all_$b_0);
            if (has_second) { store_dbc(at_$b + 1u, all_$b_1); }
        }
    //#end
}

//#include common/eight_of.wgsl
//#include common/tree8.wgsl
