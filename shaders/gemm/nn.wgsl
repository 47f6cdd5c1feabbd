// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// x (rows, ·) is read from unit x_unit0 on; w (K, columns): the reduction runs down w's columns,
// so w may be a shard of a matrix's rows and the shards' products be accumulated.
// u (rows, r), a (r, columns) float32: the LoRA term (LORA), masked as its forward was (DROPOUT).
// With ROW_COUNT only the first batch_info[0] - first_row rows exist.
// Workgroups along z have k_part rows of w each; their results lie one below the other in y.
// Each invocation holds TILE_M × 8 results. Launcher: ops/gemm.py.
//#include common/nn_interface.wgsl
//#include common/weight8.wgsl
//#include common/gemm_store.wgsl

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
    let w0 = expert * params.w_expert + c0 / 8u;
    let column = c0 / 8u;
    let last = params.k - 1u;
    //#unroll i TILE_M: let m_$i = min(m0 + $iu, rows - 1u);
    //#unroll i TILE_M: var even_$i = vec4<f32>(0.0); var odd_$i = vec4<f32>(0.0);
    let k_last = min(params.k, (group.z + 1u) * params.k_part);
    for (var k = group.z * params.k_part; k < k_last; k += 8u) {
        // Rows of w past the last meet zeros in x's padding.
        //#unroll i TILE_M: let xu_$i = x[m_$i * params.x_stride + params.x_unit0 + k / 8u]; let xe_$i = even8(xu_$i); let xo_$i = odd8(xu_$i);
        { let we = w[min(k, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xe_$i.x * e; odd_$i += xe_$i.x * o;
        }
        { let we = w[min(k + 1u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xo_$i.x * e; odd_$i += xo_$i.x * o;
        }
        { let we = w[min(k + 2u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xe_$i.y * e; odd_$i += xe_$i.y * o;
        }
        { let we = w[min(k + 3u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xo_$i.y * e; odd_$i += xo_$i.y * o;
        }
        { let we = w[min(k + 4u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xe_$i.z * e; odd_$i += xe_$i.z * o;
        }
        { let we = w[min(k + 5u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xo_$i.z * e; odd_$i += xo_$i.z * o;
        }
        { let we = w[min(k + 6u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xe_$i.w * e; odd_$i += xe_$i.w * o;
        }
        { let we = w[min(k + 7u, last) * params.w_stride + w0]; let e = weight_even8(we); let o = weight_odd8(we);
        //#unroll i TILE_M: even_$i += xo_$i.w * e; odd_$i += xo_$i.w * o;
        }
    }
    //#unroll i TILE_M: even_$i *= params.scale; odd_$i *= params.scale;
    //#unroll i TILE_M: var lo_$i = vec4<f32>(even_$i.x, odd_$i.x, even_$i.y, odd_$i.y); var hi_$i = vec4<f32>(even_$i.z, odd_$i.z, even_$i.w, odd_$i.w);
//#if LORA
    //#unroll i TILE_M: var lora_lo_$i = vec4<f32>(0.0); var lora_hi_$i = vec4<f32>(0.0);
    let a0 = adapter_at(expert) + 2u * column;
    for (var j = 0u; j < params.r; j += 1u) {
        let a_lo = a[a0 + j * params.y_stride];
        let a_hi = a[a0 + j * params.y_stride + 1u];
        //#unroll i TILE_M: { let v = u[m_$i * params.r_stride + j]; lora_lo_$i += v * a_lo; lora_hi_$i += v * a_hi; }
    }
//#if DROPOUT
    //#unroll i TILE_M: { let at = m_$i * params.y_stride * 4u + c0; lora_lo_$i *= dropout_mask4(at); lora_hi_$i *= dropout_mask4(at + 4u); }
//#endif
    //#unroll i TILE_M: lo_$i += lora_lo_$i; hi_$i += lora_hi_$i;
//#endif
    let below = group.z * params.rows;
    //#unroll i TILE_M: if (m0 + $iu < rows) { store4(below + m0 + $iu, c0, lo_$i); store4(below + m0 + $iu, c0 + 4u, hi_$i); }
}
