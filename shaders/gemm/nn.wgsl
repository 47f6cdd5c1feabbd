// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// x (rows, ·) is read from unit x_unit0 on; w (K, columns): the reduction runs down w's columns,
// so w may be a shard of a matrix's rows and the shards' products be accumulated.
// u (rows, r), a (r, columns) float32: the LoRA term, masked as its forward was (DROPOUT).
// With ROW_COUNT only the first batch_info[0] - first_row rows exist.
// Workgroups along z have k_part rows of w each; their results lie one below the other in y.
// Each invocation holds TILE_M × 8 results. Launcher: kernels/gemm/launch.py.
//#include common/gemm_interface.wgsl
//#include common/gemm_rows.wgsl
//#input 1 x: 8
//#input 2 w: 8
//#input 4 u?: 1 float32
//#input 5 a?: 4 float32

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
    let column = c0 / 8u;
    let w_at = expert * params.w_expert + column;
    let last = params.k - 1u;
    //#unroll i TILE_M
        let m_$i = min(m0 + $iu, rows - 1u);
        var even_$i = vec4<f32>(0.0);
        var odd_$i = vec4<f32>(0.0);
    //#end
    let k_last = min(params.k, (group.z + 1u) * params.k_part);
    for (var k = group.z * params.k_part; k < k_last; k += 8u) {
        // Rows of w past the last meet zeros in x's padding.
        //#unroll i TILE_M: let x_$i = unpack_x(raw_row(m_$i, k / 8u));
        //#unroll t 4
            {
                let w = load_w(min(k + 2u * $tu, last) * params.w_stride + w_at);
                //#unroll i TILE_M: even_$i += x_$i.even[$tu] * w.even; odd_$i += x_$i.even[$tu] * w.odd;
            }
            {
                let w = load_w(min(k + 2u * $tu + 1u, last) * params.w_stride + w_at);
                //#unroll i TILE_M: even_$i += x_$i.odd[$tu] * w.even; odd_$i += x_$i.odd[$tu] * w.odd;
            }
        //#end
    }
    //#unroll i TILE_M
        var lo_$i = params.scale * low(Eight(even_$i, odd_$i));
        var hi_$i = params.scale * high(Eight(even_$i, odd_$i));
    //#end
//#if u
    //#unroll i TILE_M: var lora_lo_$i = vec4<f32>(0.0); var lora_hi_$i = vec4<f32>(0.0);
    let a_at = adapter_at(expert) + 2u * column;
    for (var j = 0u; j < params.r; j += 1u) {
        let a_lo = load_a(a_at + j * params.y_stride);
        let a_hi = load_a(a_at + j * params.y_stride + 1u);
        //#unroll i TILE_M
            { let v = load_u(m_$i * params.r_stride + j); lora_lo_$i += v * a_lo; lora_hi_$i += v * a_hi; }
        //#end
    }
//#if DROPOUT
    //#unroll i TILE_M
        { let at = m_$i * params.y_stride * 4u + c0; lora_lo_$i *= dropout_mask4(at); lora_hi_$i *= dropout_mask4(at + 4u); }
    //#end
//#endif
    //#unroll i TILE_M: lo_$i += lora_lo_$i; hi_$i += lora_hi_$i;
//#endif
    let below = group.z * params.rows;
    //#unroll i TILE_M
        if (m0 + $iu < rows) {
            store4(below + m0 + $iu, c0, lo_$i);
            store4(below + m0 + $iu, c0 + 4u, hi_$i);
        }
    //#end
}
