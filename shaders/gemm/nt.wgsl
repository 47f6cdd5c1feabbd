// y[m, c] (+)= scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// x (rows, K), w (columns, K): both read along their rows, K padded with zeros to units of eight.
// u (rows, r), b (·, r) float32: the LoRA term, r padded with zeros to units of four.
// y (rows, ·) is written from column 4·y_unit0 on, so that w may be a shard of a matrix's rows;
// b and bias are those of the whole matrix.
// With ROW_COUNT only the first batch_info[0] - first_row rows exist. With DROPOUT x is masked.
// Each invocation holds TILE_M × 8 results. Launcher: kernels/gemm/launch.py.
//#include common/gemm_interface.wgsl
//#input 1 x: 8
//#input 2 w: 8
//#input 4 u?: 4 float32
//#input 5 b?: 4 float32

//#if DROPOUT
fn masked(v: Eight, unit: u32) -> Eight {
    return multiply8(v, dropout_mask8(8u * unit));
}
//#else
fn masked(v: Eight, unit: u32) -> Eight {
    return v;
}
//#endif

@compute @workgroup_size(WG_N, WG_M)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let c0 = (group.x * WG_N + local.x) * 8u;
    let m0 = (group.y * WG_M + local.y) * TILE_M;
    let rows = row_count();
    if (m0 >= rows || c0 >= params.columns) {
        return;
    }
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    //#unroll i TILE_M: let m_$i = min(m0 + $iu, rows - 1u);
    //#unroll j 8: let c_$j = min(c0 + $ju, params.columns - 1u);
    //#unroll j 8: let w_at_$j = expert * params.w_expert + c_$j * params.w_stride;
    //#unroll i TILE_M, j 8: var acc_$i_$j = 0.0;
    for (var k = 0u; k < (params.k + 7u) / 8u; k += 1u) {
        //#unroll j 8: let w_$j = load_w(w_at_$j + k);
        //#unroll i TILE_M
            let at_$i = m_$i * params.x_stride + k;
            let x_$i = masked(load_x(at_$i), at_$i);
        //#end
        //#unroll i TILE_M, j 8: acc_$i_$j += dot8(x_$i, w_$j);
    }
    //#unroll i TILE_M, j 8: acc_$i_$j *= params.scale;
//#if u
    let r_stride = params.r_stride / 4u;
    let b_stride = params.b_stride / 4u;
    let b_at = adapter_at(expert) + 4u * params.y_unit0 * b_stride;
    let u_at = layer_of(c0) * (params.r / 4u);
    for (var k = 0u; k < (params.r + 3u) / 4u; k += 1u) {
        //#unroll j 8: let b_$j = load_b(b_at + c_$j * b_stride + k);
        //#unroll i TILE_M: let u_$i = load_u(m_$i * r_stride + u_at + k);
        //#unroll i TILE_M, j 8: acc_$i_$j += dot(u_$i, b_$j);
    }
//#endif
    //#unroll i TILE_M
        if (m0 + $iu < rows) {
            store4(m0 + $iu, c0, vec4<f32>(acc_$i_0, acc_$i_1, acc_$i_2, acc_$i_3));
            store4(m0 + $iu, c0 + 4u, vec4<f32>(acc_$i_4, acc_$i_5, acc_$i_6, acc_$i_7));
        }
    //#end
}
