// y[m, c] (+)= scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// x (rows, K), w (columns, K): both read along their rows, K padded with zeros to units of eight.
// u (rows, r), b (·, r) float32: the LoRA term (LORA), r padded with zeros to units of four.
// y (rows, ·) is written from column 4·y_unit0 on, so that w may be a shard of a matrix's rows;
// b and bias are those of the whole matrix.
// With ROW_COUNT only the first batch_info[0] - first_row rows exist. With DROPOUT x is masked.
// Each invocation holds TILE_M × 8 results. Launcher: ops/gemm.py.
//#include common/nt_interface.wgsl
//#include common/weight8.wgsl
//#include common/gemm_store.wgsl
//#if DROPOUT
//#include common/dropout.wgsl
fn mask_even(row: u32, k: u32) -> vec4<f32> {
    let i = (row * params.k_units + k) * 8u;
    return vec4<f32>(dropout_mask(i), dropout_mask(i + 2u), dropout_mask(i + 4u), dropout_mask(i + 6u));
}

fn mask_odd(row: u32, k: u32) -> vec4<f32> {
    let i = (row * params.k_units + k) * 8u;
    return vec4<f32>(dropout_mask(i + 1u), dropout_mask(i + 3u), dropout_mask(i + 5u), dropout_mask(i + 7u));
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
    //#unroll j 8: let w_$j = expert * params.w_expert + c_$j * params.w_stride;
    //#unroll i TILE_M, j 8: var acc_$i_$j = 0.0;
    for (var k = 0u; k < params.k_units; k += 1u) {
        //#unroll j 8: let wu_$j = w[w_$j + k]; let we_$j = weight_even8(wu_$j); let wo_$j = weight_odd8(wu_$j);
        //#unroll i TILE_M: let xu_$i = x[m_$i * params.x_stride + k];
//#if DROPOUT
        //#unroll i TILE_M: let xe_$i = even8(xu_$i) * mask_even(m_$i, k); let xo_$i = odd8(xu_$i) * mask_odd(m_$i, k);
//#else
        //#unroll i TILE_M: let xe_$i = even8(xu_$i); let xo_$i = odd8(xu_$i);
//#endif
        //#unroll i TILE_M, j 8: acc_$i_$j += dot(xe_$i, we_$j) + dot(xo_$i, wo_$j);
    }
    //#unroll i TILE_M, j 8: acc_$i_$j *= params.scale;
//#if LORA
    let b0 = adapter_at(expert) + 4u * params.y_unit0 * params.r_stride;
    for (var k = 0u; k < params.r_units; k += 1u) {
        //#unroll j 8: let bu_$j = b[b0 + c_$j * params.r_stride + k];
        //#unroll i TILE_M: let uu_$i = u[m_$i * params.r_stride + k];
        //#unroll i TILE_M, j 8: acc_$i_$j += dot(uu_$i, bu_$j);
    }
//#endif
    //#unroll i TILE_M: if (m0 + $iu < rows) { store4(m0 + $iu, c0, vec4<f32>(acc_$i_0, acc_$i_1, acc_$i_2, acc_$i_3)); store4(m0 + $iu, c0 + 4u, vec4<f32>(acc_$i_4, acc_$i_5, acc_$i_6, acc_$i_7)); }
}
