// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// gemm/nn.wgsl for software adapters: x, w and a lie in textures. A workgroup is one subgroup of
// THREADS and makes BLOCKS · SPAN rows by 8 · THREADS columns: each invocation loads eight columns
// of w, the rows of x are loaded one by each invocation and broadcast to all. A last tile of at most
// half the width may have half as many columns an invocation (common/gemm_narrow.wgsl). With WHOLE_K
// there are whole eights of k, which saves instructions.
// Launcher: kernels/gemm/launch.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_narrow.wgsl
//#input 1 x: 8 texture
//#input 2 w: 8 texture
//#input 4 u?: 4 float32
//#input 5 a?: 8 float32 texture
// Not where some rows are left alone.
//#if !ROW_COUNT
//#if !tile_experts
//#input 9 y_before?: 4 float32 texture
//#endif
//#endif

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
    let column = min(c0, params.columns - 1u) / 8u;
    let w_at = expert * params.w_expert + column;
    let last = params.k - 1u;
    //#unroll p BLOCKS
        let m_$p = min(m0 + $pu * SPAN + local.x % SPAN, rows - 1u);
        let x_at_$p = params.x_unit0 + m_$p * params.x_stride;
    //#end
    //#unroll p BLOCKS, s SPAN: var even_$p_$s = vec4<f32>(0.0); var odd_$p_$s = vec4<f32>(0.0);
    for (var k = select(0u, params.k, narrow); k < params.k; k += 8u) {
//#if WHOLE_K
        let w_k = w_at + k * params.w_stride;
        //#unroll j 8: let w_$j = load_w(w_k + $ju * params.w_stride);
//#else
        // Rows of w past the last meet zeros in x's padding.
        //#unroll j 8: let w_$j = load_w(w_at + min(k + $ju, last) * params.w_stride);
//#endif
        //#unroll p BLOCKS: let x_$p = load_x(x_at_$p + k / 8u);
        //#unroll p BLOCKS, s SPAN
            let v_$p_$s = broadcast_x_$s(x_$p);
            even_$p_$s += ((v_$p_$s.even.x * w_0.even + v_$p_$s.odd.x * w_1.even) + (v_$p_$s.even.y * w_2.even + v_$p_$s.odd.y * w_3.even))
                + ((v_$p_$s.even.z * w_4.even + v_$p_$s.odd.z * w_5.even) + (v_$p_$s.even.w * w_6.even + v_$p_$s.odd.w * w_7.even));
            odd_$p_$s += ((v_$p_$s.even.x * w_0.odd + v_$p_$s.odd.x * w_1.odd) + (v_$p_$s.even.y * w_2.odd + v_$p_$s.odd.y * w_3.odd))
                + ((v_$p_$s.even.z * w_4.odd + v_$p_$s.odd.z * w_5.odd) + (v_$p_$s.even.w * w_6.odd + v_$p_$s.odd.w * w_7.odd));
        //#end
    }
//#if NARROW
    // Four columns lie in even_, one after the other.
    for (var k = select(params.k, 0u, narrow); k < params.k; k += 8u) {
//#if WHOLE_K
        let w_k = w_at + k * params.w_stride;
        //#unroll j 8: let w_$j = half_at(c0, load_w(w_k + $ju * params.w_stride));
//#else
        //#unroll j 8: let w_$j = half_at(c0, load_w(w_at + min(k + $ju, last) * params.w_stride));
//#endif
        //#unroll p BLOCKS: let x_$p = load_x(x_at_$p + k / 8u);
        //#unroll p BLOCKS, s SPAN
            let v_$p_$s = broadcast_x_$s(x_$p);
            even_$p_$s += ((v_$p_$s.even.x * w_0 + v_$p_$s.odd.x * w_1) + (v_$p_$s.even.y * w_2 + v_$p_$s.odd.y * w_3))
                + ((v_$p_$s.even.z * w_4 + v_$p_$s.odd.z * w_5) + (v_$p_$s.even.w * w_6 + v_$p_$s.odd.w * w_7));
        //#end
    }
//#endif
    //#unroll p BLOCKS, s SPAN: even_$p_$s *= params.scale; odd_$p_$s *= params.scale;
//#if u
//#if DROPOUT
    //#unroll p BLOCKS, s SPAN
        let mask_$p_$s = own_columns(narrow, 0u, dropout_mask8((m0 + $pu * SPAN + $su) * params.y_stride * 4u + c0));
    //#end
//#endif
    for (var j = 0u; j < params.r; j += 4u) {
        // Ranks past the last meet zeros in u's padding.
        //#unroll t 4
            let a_$t = own_columns(narrow, c0, load_a(adapter_at(expert) / 2u + min(j + $tu, params.r - 1u) * (params.y_stride / 2u) + column));
        //#end
        //#unroll p BLOCKS: let u_$p = load_u((m_$p * params.r_stride + j) / 4u);
        //#unroll p BLOCKS, s SPAN
            let t_$p_$s = broadcast_u_$s(u_$p);
//#if DROPOUT
            even_$p_$s += mask_$p_$s.even * (t_$p_$s.x * a_0.even + t_$p_$s.y * a_1.even + t_$p_$s.z * a_2.even + t_$p_$s.w * a_3.even);
            odd_$p_$s += mask_$p_$s.odd * (t_$p_$s.x * a_0.odd + t_$p_$s.y * a_1.odd + t_$p_$s.z * a_2.odd + t_$p_$s.w * a_3.odd);
//#else
            even_$p_$s += t_$p_$s.x * a_0.even + t_$p_$s.y * a_1.even + t_$p_$s.z * a_2.even + t_$p_$s.w * a_3.even;
            odd_$p_$s += t_$p_$s.x * a_0.odd + t_$p_$s.y * a_1.odd + t_$p_$s.z * a_2.odd + t_$p_$s.w * a_3.odd;
//#endif
        //#end
    }
//#endif
    //#unroll p BLOCKS, s SPAN
        {
            let all = Eight(even_$p_$s, odd_$p_$s);
            let lo = select(low(all), all.even, narrow);
            store_tile(m0 + $pu * SPAN + $su, rows, c0, narrow, lo, high(all));
        }
    //#end
}
