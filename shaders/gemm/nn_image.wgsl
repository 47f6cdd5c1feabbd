// y[m, c] (+)= scale · Σ_k x[m, k] · w[k, c]  + mask[m, c] · Σ_j u[m, j] · a[j, c]
//
// gemm/nn.wgsl for software adapters: x, w and a are images. A workgroup is one subgroup of LANES
// and makes BLOCKS · SPAN rows by 8 · LANES columns: each invocation loads eight columns of w, the
// rows of x are loaded one by each invocation and broadcast to all.
// x, w start at x_unit0, w_unit0 (units of eight), a at a_texel0. The rest as there.
// Launcher: ops/gemm_image.py.
//#include common/image8.wgsl
//#include common/gemm_store.wgsl
//#include common/experts.wgsl

struct Params {
    rows: u32,
    columns: u32,
    k: u32,
    x_unit0: u32,
    x_stride: u32,
    w_unit0: u32,
    w_stride: u32,
    y_stride: u32,
    y_unit0: u32,
    first_row: u32,
    r: u32,
    r_stride: u32,
    a_texel0: u32,
    scale: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    expert0: u32,
    experts: u32,
    w_expert: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var x: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var w: texture_storage_2d<rgba32uint, read>;
//#if OUT_BF16
@group(0) @binding(3) var<storage, read_write> y: array<vec2<u32>>;
//#else
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;
//#endif
//#if LORA
@group(0) @binding(4) var<storage, read> u: array<vec4<f32>>;
@group(0) @binding(5) var a: texture_storage_2d<rgba32uint, read>;
//#endif
//#if NEEDS_BATCH_INFO
@group(0) @binding(8) var<storage, read> batch_info: array<u32>;
//#endif
//#if DROPOUT
//#include common/dropout.wgsl
//#endif

fn product_even(v: Eight, w0: Eight, w1: Eight, w2: Eight, w3: Eight, w4: Eight, w5: Eight, w6: Eight, w7: Eight) -> vec4<f32> {
    return v.even.x * w0.even + v.odd.x * w1.even + v.even.y * w2.even + v.odd.y * w3.even + v.even.z * w4.even + v.odd.z * w5.even + v.even.w * w6.even + v.odd.w * w7.even;
}

fn product_odd(v: Eight, w0: Eight, w1: Eight, w2: Eight, w3: Eight, w4: Eight, w5: Eight, w6: Eight, w7: Eight) -> vec4<f32> {
    return v.even.x * w0.odd + v.odd.x * w1.odd + v.even.y * w2.odd + v.odd.y * w3.odd + v.even.z * w4.odd + v.odd.z * w5.odd + v.even.w * w6.odd + v.odd.w * w7.odd;
}

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let c0 = (group.y * LANES + local.x) * 8u;
    let m0 = group.x * (BLOCKS * SPAN);
//#if ROW_COUNT
    let rows = min(params.rows, max(batch_info[0], params.first_row) - params.first_row);
//#else
    let rows = params.rows;
//#endif
    if (m0 >= rows) {
        return;
    }
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    let w0 = params.w_unit0 + expert * params.w_expert;
    // No invocation leaves alone: a broadcast needs all of them. Those past the end repeat the last.
    let column = min(c0, params.columns - 1u) / 8u;
    let last = params.k - 1u;
    //#unroll p BLOCKS: let m_$p = min(m0 + $pu * SPAN + local.x % SPAN, rows - 1u); let x_at_$p = params.x_unit0 + m_$p * params.x_stride;
    //#unroll p BLOCKS, s SPAN: var even_$p_$s = vec4<f32>(0.0); var odd_$p_$s = vec4<f32>(0.0);
    for (var k = 0u; k < params.k; k += 8u) {
        // Rows of w past the last meet zeros in x's padding.
//#if BF16
        //#unroll j 8: let w_$j = load_bf16(w, w0 + min(k + $ju, last) * params.w_stride + column);
        //#unroll p BLOCKS: let x_$p = texel(x, x_at_$p + k / 8u);
        //#unroll p BLOCKS, s SPAN: let v_$p_$s = eight_bf16(subgroupBroadcast(x_$p, $su)); even_$p_$s += product_even(v_$p_$s, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7); odd_$p_$s += product_odd(v_$p_$s, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7);
//#else
        //#unroll j 8: let w_$j = load_f32(w, w0 + min(k + $ju, last) * params.w_stride + column);
        //#unroll p BLOCKS: let lo_$p = texel(x, 2u * (x_at_$p + k / 8u)); let hi_$p = texel(x, 2u * (x_at_$p + k / 8u) + 1u);
        //#unroll p BLOCKS, s SPAN: let v_$p_$s = eight_f32(subgroupBroadcast(lo_$p, $su), subgroupBroadcast(hi_$p, $su)); even_$p_$s += product_even(v_$p_$s, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7); odd_$p_$s += product_odd(v_$p_$s, w_0, w_1, w_2, w_3, w_4, w_5, w_6, w_7);
//#endif
    }
    //#unroll p BLOCKS, s SPAN: even_$p_$s *= params.scale; odd_$p_$s *= params.scale;
//#if LORA
//#if DROPOUT
    //#unroll p BLOCKS, s SPAN: var mask_even_$p_$s: vec4<f32>; var mask_odd_$p_$s: vec4<f32>; { let at = (m0 + $pu * SPAN + $su) * params.y_stride * 4u + c0; let lo = dropout_mask4(at); let hi = dropout_mask4(at + 4u); mask_even_$p_$s = vec4<f32>(lo.xz, hi.xz); mask_odd_$p_$s = vec4<f32>(lo.yw, hi.yw); }
//#endif
    let a0 = (params.a_texel0 + adapter_at(expert)) / 2u;
    for (var j = 0u; j < params.r; j += 4u) {
        // Ranks past the last meet zeros in u's padding.
        //#unroll t 4: let a_$t = load_f32(a, a0 + min(j + $tu, params.r - 1u) * (params.y_stride / 2u) + column);
        //#unroll p BLOCKS: let u_$p = u[(m_$p * params.r_stride + j) / 4u];
//#if DROPOUT
        //#unroll p BLOCKS, s SPAN: let t_$p_$s = subgroupBroadcast(u_$p, $su); even_$p_$s += mask_even_$p_$s * (t_$p_$s.x * a_0.even + t_$p_$s.y * a_1.even + t_$p_$s.z * a_2.even + t_$p_$s.w * a_3.even); odd_$p_$s += mask_odd_$p_$s * (t_$p_$s.x * a_0.odd + t_$p_$s.y * a_1.odd + t_$p_$s.z * a_2.odd + t_$p_$s.w * a_3.odd);
//#else
        //#unroll p BLOCKS, s SPAN: let t_$p_$s = subgroupBroadcast(u_$p, $su); even_$p_$s += t_$p_$s.x * a_0.even + t_$p_$s.y * a_1.even + t_$p_$s.z * a_2.even + t_$p_$s.w * a_3.even; odd_$p_$s += t_$p_$s.x * a_0.odd + t_$p_$s.y * a_1.odd + t_$p_$s.z * a_2.odd + t_$p_$s.w * a_3.odd;
//#endif
    }
//#endif
    if (c0 < params.columns) {
        //#unroll p BLOCKS, s SPAN: if (m0 + $pu * SPAN + $su < rows) { let e = even_$p_$s; let o = odd_$p_$s; let row = m0 + $pu * SPAN + $su; store4(row, c0, vec4<f32>(e.x, o.x, e.y, o.y)); store4(row, c0 + 4u, vec4<f32>(e.z, o.z, e.w, o.w)); }
    }
}
