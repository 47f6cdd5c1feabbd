// states of each chunk: S before it, S = kept · S + Σ_j out of_j · B_j ⊗ dt_j · x_j; or (REVERSE), chunk after
// chunk from the last, dS after it, dS = kept · dS + Σ_i into_i · C_i ⊗ dy_i, where sums (sequences, heads,
// chunks, tiles) are those of S · dS.
//
// x, or dy (rows, heads of all · head_dim), bc, tokens as common/mamba_chunks.wgsl has them; states, sums and
// last[places[0]] (heads of all, state_size, head_dim), the state after the last token, are overwritten as far as
// bound. An invocation has eight rows of a state by UNITS units of its columns. Launcher: kernels/mamba_chunks.py.
//#include common/mamba_chunks.wgsl

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 tokens: 8 float32 texture
//#input 2 bc: 8 texture
//#input 3 x: 8 texture
//#output 4 states: 8 float32
//#if REVERSE
//#input 5 before: 8 float32 texture
@group(0) @binding(6) var<storage, read_write> sums: array<f32>;
//#endif
//#output 7 last?: 8 float32
//#if last
@group(0) @binding(8) var<storage, read> places: array<u32>;
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let across = (params.head_units + UNITS - 1u) / UNITS;
    let unit0 = group.x % across * UNITS;
    let own = group.x / across * THREADS + local.x;
    let inside = own < params.state_units;
    let n = min(own, params.state_units - 1u);
    let head = params.first_head + group.y;
    let own_at = select(0u, params.c_at, REVERSE) + head / params.group * params.state_units + n;
    //#unroll u UNITS
        let unit_$u = min(unit0 + $uu, params.head_units - 1u);
        let has_$u = inside && unit0 + $uu < params.head_units;
        //#unroll m 4: var even_$m_$u = zero8(); var odd_$m_$u = zero8();
    //#end
    for (var past = 0u; past < params.chunks; past += 1u) {
//#if REVERSE
        let chunk = params.chunks - 1u - past;
//#else
        let chunk = past;
//#endif
        let first = chunk * CHUNK;
        let count = count_of(first);
        let row0 = group.z * params.seq + first;
        let state_at = first_unit_of_state(group.z, group.y, chunk) + 8u * n * params.head_units;
        let keep = high(load_tokens(row0 * params.heads + group.y)).y;
//#if REVERSE
        var sum = 0.0;
        //#unroll u UNITS, m 4
            let even_at_$u_$m = state_at + 2u * $mu * params.head_units + unit_$u;
            sum += select(0.0, dot8(even_$m_$u, load_before(even_at_$u_$m)) + dot8(odd_$m_$u, load_before(even_at_$u_$m + params.head_units)), has_$u);
        //#end
        sum = subgroupAdd(sum);
        if (local.x == 0u) {
            let tiles = across * ((params.state_units + THREADS - 1u) / THREADS);
            sums[((group.z * params.heads + group.y) * params.chunks + chunk) * tiles + group.x] = sum;
        }
//#endif
        //#unroll u UNITS
            if (has_$u) {
                //#unroll m 4
                    store_states(state_at + 2u * $mu * params.head_units + unit_$u, even_$m_$u);
                    store_states(state_at + (2u * $mu + 1u) * params.head_units + unit_$u, odd_$m_$u);
                //#end
            }
            //#unroll m 4: even_$m_$u = scale8(even_$m_$u, keep); odd_$m_$u = scale8(odd_$m_$u, keep);
        //#end
        for (var t = 0u; t < count; t += 8u) {
            //#unroll p BLOCKS
                let t_$p = t + $pu * SPAN + local.x % SPAN;
                let row_$p = row0 + min(t_$p, count - 1u);
                let weights_$p = low(load_tokens(row_$p * params.heads + group.y));
//#if REVERSE
                let weight_$p = select(0.0, weights_$p.z, t_$p < count);
//#else
                let weight_$p = select(0.0, weights_$p.w * weights_$p.y, t_$p < count);
//#endif
                //#unroll u UNITS: let x_$p_$u = scale8(load_x(row_$p * params.head_stride + head * params.head_units + unit_$u), weight_$p);
            //#end
            //#unroll p BLOCKS, s SPAN: let own_$p_$s = load_bc((row0 + min(t + $pu * SPAN + $su, count - 1u)) * params.state_stride + own_at);
            //#unroll u UNITS
                //#unroll m 4: var e_$m_$u = zero8(); var o_$m_$u = zero8();
                //#unroll p BLOCKS, s SPAN
                    let v_$u_$p_$s = broadcast_x_$s(x_$p_$u);
                    //#unroll m 4: e_$m_$u = add_scaled8(e_$m_$u, own_$p_$s.even[$m], v_$u_$p_$s); o_$m_$u = add_scaled8(o_$m_$u, own_$p_$s.odd[$m], v_$u_$p_$s);
                //#end
                //#unroll m 4: even_$m_$u = add8(even_$m_$u, e_$m_$u); odd_$m_$u = add8(odd_$m_$u, o_$m_$u);
            //#end
        }
    }
//#if last
    let all = params.head_stride / params.head_units;
    let last_at = ((places[0] * all + head) * params.state_units + n) * 8u * params.head_units;
    //#unroll u UNITS
        if (has_$u) {
            //#unroll m 4
                store_last(last_at + 2u * $mu * params.head_units + unit_$u, even_$m_$u);
                store_last(last_at + (2u * $mu + 1u) * params.head_units + unit_$u, odd_$m_$u);
            //#end
        }
    //#end
//#endif
}
