// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// gemm/nt.wgsl for software adapters: x, w and b lie in textures. A workgroup is one subgroup of
// THREADS and makes BLOCKS · SPAN rows by 8 · THREADS columns: each invocation loads eight rows of
// w, the rows of x are loaded one by each invocation and broadcast to all. A last tile of at most half
// the width may have half as many columns an invocation (common/gemm_narrow.wgsl).
// Launcher: kernels/gemm/launch.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_narrow.wgsl
//#input 1 x: 8 texture
//#input 2 w: 8 texture
//#input 4 u?: 4 float32
//#input 5 b?: 4 float32 texture

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let narrow = is_narrow(group.y);
    let c0 = first_column(group.y, local.x, narrow);
    let m0 = group.x * (BLOCKS * SPAN);
    let rows = row_count();
    if (m0 >= rows) {
        return;
    }
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    // No invocation leaves alone: a broadcast needs all of them. Those past the end repeat the last.
    //#unroll j 8
        let c_$j = min(c0 + $ju, params.columns - 1u);
        let w_at_$j = expert * params.w_expert + c_$j * params.w_stride;
    //#end
    //#unroll p BLOCKS: let m_$p = min(m0 + $pu * SPAN + local.x % SPAN, rows - 1u);
    //#unroll p BLOCKS, s SPAN: var lo_$p_$s = vec4<f32>(0.0); var hi_$p_$s = vec4<f32>(0.0);
    let turns = (params.k + 7u) / 8u;
    for (var k = select(0u, turns, narrow); k < turns; k += 1u) {
        //#unroll j 8: let w_$j = load_w(w_at_$j + k);
        //#unroll p BLOCKS: let x_$p = load_x(m_$p * params.x_stride + k);
        //#unroll p BLOCKS, s SPAN
            let v_$p_$s = broadcast_x_$s(x_$p);
            lo_$p_$s += vec4<f32>(tree8(v_$p_$s, w_0), tree8(v_$p_$s, w_1), tree8(v_$p_$s, w_2), tree8(v_$p_$s, w_3));
            hi_$p_$s += vec4<f32>(tree8(v_$p_$s, w_4), tree8(v_$p_$s, w_5), tree8(v_$p_$s, w_6), tree8(v_$p_$s, w_7));
        //#end
    }
//#if NARROW
    for (var k = select(turns, 0u, narrow); k < turns; k += 1u) {
        //#unroll j 4: let w_$j = load_w(w_at_$j + k);
        //#unroll p BLOCKS: let x_$p = load_x(m_$p * params.x_stride + k);
        //#unroll p BLOCKS, s SPAN
            let v_$p_$s = broadcast_x_$s(x_$p);
            lo_$p_$s += vec4<f32>(tree8(v_$p_$s, w_0), tree8(v_$p_$s, w_1), tree8(v_$p_$s, w_2), tree8(v_$p_$s, w_3));
        //#end
    }
//#endif
    //#unroll p BLOCKS, s SPAN: lo_$p_$s *= params.scale; hi_$p_$s *= params.scale;
//#if u
    let r_stride = params.r_stride / 4u;
    let b_stride = params.b_stride / 4u;
    let b_at = adapter_at(expert) + 4u * params.y_unit0 * b_stride;
    for (var k = 0u; k < (params.r + 3u) / 4u; k += 1u) {
        //#unroll j 8: let b_$j = load_b(b_at + c_$j * b_stride + k);
        //#unroll p BLOCKS: let u_$p = load_u(m_$p * r_stride + k);
        //#unroll p BLOCKS, s SPAN
            let t_$p_$s = broadcast_u_$s(u_$p);
            lo_$p_$s += vec4<f32>(dot(t_$p_$s, b_0), dot(t_$p_$s, b_1), dot(t_$p_$s, b_2), dot(t_$p_$s, b_3));
            hi_$p_$s += vec4<f32>(dot(t_$p_$s, b_4), dot(t_$p_$s, b_5), dot(t_$p_$s, b_6), dot(t_$p_$s, b_7));
        //#end
    }
//#endif
    //#unroll p BLOCKS, s SPAN
        store_tile(m0 + $pu * SPAN + $su, rows, c0, narrow, lo_$p_$s, hi_$p_$s);
    //#end
}

//#include common/tree8.wgsl
