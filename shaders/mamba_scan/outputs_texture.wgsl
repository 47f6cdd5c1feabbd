// y_i = into_i · Sᵀ·C_i + Σ_{j ≤ i} Γ_ij · pairs_ij · dt_j · x_j + D · x_i; or (REVERSE)
// u_j = out of_j · dSᵀ·B_j + Σ_{i ≥ j} Γ_ij · pairs_ji · dy_i,  dx_j = dt_j · u_j + D · dy_j,
// where direct_j (rows, heads, tiles) is the sum of x_j · u_j over a tile of columns.
//
// tokens, states, bc, pairs (the transposed ones with REVERSE) as common/mamba_chunks.wgsl has them; x, dy (rows,
// heads of all · head_dim), dy as `values`; y, or dx, and direct are overwritten. A workgroup has UNITS units of
// the columns of its tokens. Γ_ij is a sum of decays one by one, since differences of running sums would lose what
// a strong decay before them took. Launcher: kernels/mamba_chunks.py.
//#include common/mamba_chunks.wgsl

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 tokens: 8 float32 texture
//#input 2 states: 8 float32 texture
//#input 3 bc: 8 texture
//#input 4 pairs: 8 float32 texture
//#input 5 values: 8 texture
//#output 6 y: 8
//#if REVERSE
//#input 7 x: 8 texture
@group(0) @binding(8) var<storage, read_write> direct: array<f32>;
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let across = (params.head_units + UNITS - 1u) / UNITS;
    let unit0 = group.x % across * UNITS;
    let block = group.x / across;
    let first = block * (SETS * THREADS) / CHUNK * CHUNK;
    let begin = block * (SETS * THREADS) - first;
    if (first + begin >= params.seq) {
        return;
    }
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let head = params.first_head + group.y;
    let in_group = head / params.group;
    let groups = params.c_at / params.state_units;
    let state_at = first_unit_of_state(group.z, group.y, first / CHUNK);
    //#unroll b SETS
        let i_$b = begin + $bu * THREADS + local.x;
        let row_$b = row0 + min(i_$b, count - 1u);
        let own_at_$b = row_$b * params.state_stride + select(params.c_at, 0u, REVERSE) + in_group * params.state_units;
        let pairs_at_$b = (row_$b * groups + in_group) * (CHUNK / 8u);
        let token_$b = load_tokens(row_$b * params.heads + group.y);
        var sum_$b = 0.0;
    //#end
    //#unroll u UNITS
        let unit_$u = min(unit0 + $uu, params.head_units - 1u);
        //#unroll b SETS: var all_$b_$u = zero8();
    //#end
    for (var n = 0u; n < params.state_units; n += 1u) {
        //#unroll b SETS: let own_$b = load_bc(own_at_$b + n);
        //#unroll p BLOCKS, u UNITS: let state_$p_$u = load_states(state_at + (8u * n + $pu * SPAN + local.x % SPAN) * params.head_units + unit_$u);
        //#unroll u UNITS
            //#unroll b SETS: var part_$b_$u = zero8();
            //#unroll p BLOCKS, s SPAN
                let v_$u_$p_$s = broadcast_states_$s(state_$p_$u);
                //#unroll b SETS: part_$b_$u = add_scaled8(part_$b_$u, element(own_$b, $pu * SPAN + $su), v_$u_$p_$s);
            //#end
            //#unroll b SETS: all_$b_$u = add8(all_$b_$u, part_$b_$u);
        //#end
    }
    //#unroll b SETS
        let weights_$b = low(token_$b);
        let rest_$b = high(token_$b);
        //#unroll u UNITS: all_$b_$u = scale8(all_$b_$u, select(weights_$b.z, weights_$b.w, REVERSE));
    //#end
//#if REVERSE
    for (var j0 = begin; j0 < count; j0 += 8u) {
//#else
    for (var left = min(begin + SETS * THREADS, count + 7u) / 8u; left > 0u; left -= 1u) {
        let j0 = 8u * (left - 1u);
//#endif
        //#unroll b SETS
            let pairs_$b = load_pairs(pairs_at_$b + j0 / 8u);
            var near_$b: array<f32, 8>;
        //#end
        //#unroll p BLOCKS
            let t_$p = j0 + in_turn($pu * SPAN + local.x % SPAN);
            let row_of_$p = row0 + min(t_$p, count - 1u);
            let other_$p = load_tokens(row_of_$p * params.heads + group.y);
            let log_$p = low(other_$p).x;
            let factor_$p = select(0.0, select(low(other_$p).y, high(other_$p).x, REVERSE), t_$p < count);
            //#unroll u UNITS: let values_$p_$u = scale8(load_values(row_of_$p * params.head_stride + head * params.head_units + unit_$u), factor_$p);
        //#end
        //#unroll p BLOCKS, s SPAN
            let a_$p_$s = subgroupBroadcast(log_$p, $su);
            //#unroll b SETS
                let is_near_$b_$p_$s = near(i_$b, j0 + in_turn($pu * SPAN + $su));
//#if REVERSE
                sum_$b += select(0.0, a_$p_$s, i_$b < j0 + $pu * SPAN + $su);
//#endif
                near_$b[$p * SPAN + $s] = select(0.0, kept(sum_$b) * element(pairs_$b, in_turn($pu * SPAN + $su)), is_near_$b_$p_$s);
//#if !REVERSE
                sum_$b += select(0.0, a_$p_$s, is_near_$b_$p_$s);
//#endif
            //#end
        //#end
        //#unroll u UNITS
            //#unroll b SETS: var part_$b_$u = zero8();
            //#unroll p BLOCKS, s SPAN
                let v_$u_$p_$s = broadcast_values_$s(values_$p_$u);
                //#unroll b SETS: part_$b_$u = add_scaled8(part_$b_$u, near_$b[$p * SPAN + $s], v_$u_$p_$s);
            //#end
            //#unroll b SETS: all_$b_$u = add_scaled8(all_$b_$u, select(rest_$b.x, 1.0, REVERSE), part_$b_$u);
        //#end
    }
    //#unroll b SETS
        if (i_$b < count) {
//#if REVERSE
            var product_$b = 0.0;
//#endif
            //#unroll u UNITS
                if (unit0 + $uu < params.head_units) {
                    let at_$b_$u = row_$b * params.head_stride + head * params.head_units + unit_$u;
                    let skip_$b_$u = scale8(load_values(at_$b_$u), rest_$b.z);
//#if REVERSE
                    product_$b += dot8(load_x(at_$b_$u), all_$b_$u);
//#endif
                    store_y(at_$b_$u, add_scaled8(skip_$b_$u, select(1.0, weights_$b.y, REVERSE), all_$b_$u));
                }
            //#end
//#if REVERSE
            direct[(row_$b * params.heads + group.y) * across + group.x % across] = product_$b;
//#endif
        }
    //#end
}

// Place k of eight tokens, which are taken from the invocation's own token on: up, or down.
fn in_turn(k: u32) -> u32 {
    return select(7u - k, k, REVERSE);
}

fn near(own: u32, other: u32) -> bool {
    return select(other <= own, other >= own, REVERSE);
}
