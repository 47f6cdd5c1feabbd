// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// gemm/nt.wgsl for software adapters: x, w and b are images. A workgroup is one subgroup of LANES
// and makes BLOCKS · SPAN rows by 4 · LANES columns: each invocation loads four rows of w, the
// rows of x are loaded one by each invocation and broadcast to all.
// x, w, b start at x_unit0, w_unit0 (units of eight), b_texel0. The rest as there.
// Launcher: ops/gemm_image.py.
//#include common/image8.wgsl
//#include common/gemm_store.wgsl
//#include common/experts.wgsl

struct Params {
    rows: u32,
    columns: u32,
    k_units: u32,
    x_unit0: u32,
    x_stride: u32,
    w_unit0: u32,
    w_stride: u32,
    y_stride: u32,
    y_unit0: u32,
    first_row: u32,
    r_units: u32,
    r_stride: u32,
    b_texel0: u32,
    scale: f32,
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
@group(0) @binding(5) var b: texture_storage_2d<rgba32uint, read>;
//#endif
//#if BIAS
@group(0) @binding(6) var<storage, read> bias: array<vec4<f32>>;
//#endif
//#if RESIDUAL
@group(0) @binding(7) var<storage, read> residual: array<vec4<f32>>;
//#endif
//#if ROW_COUNT
@group(0) @binding(8) var<storage, read> batch_info: array<u32>;
//#endif

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let c0 = (group.y * LANES + local.x) * 4u;
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
    // No invocation leaves alone: a broadcast needs all of them. Those past the end repeat the last.
    //#unroll j 4: let c_$j = min(c0 + $ju, params.columns - 1u); let w_at_$j = params.w_unit0 + expert * params.w_expert + c_$j * params.w_stride;
    //#unroll p BLOCKS: let m_$p = min(m0 + $pu * SPAN + local.x % SPAN, rows - 1u); let x_at_$p = params.x_unit0 + m_$p * params.x_stride;
    //#unroll p BLOCKS, s SPAN: var acc_$p_$s = vec4<f32>(0.0);
    for (var k = 0u; k < params.k_units; k += 1u) {
//#if BF16
        //#unroll j 4: let w_$j = eight_bf16(texel(w, w_at_$j + k));
        //#unroll p BLOCKS: let x_$p = texel(x, x_at_$p + k);
        //#unroll p BLOCKS, s SPAN: let v_$p_$s = eight_bf16(subgroupBroadcast(x_$p, $su)); acc_$p_$s += vec4<f32>(dot8(v_$p_$s, w_0), dot8(v_$p_$s, w_1), dot8(v_$p_$s, w_2), dot8(v_$p_$s, w_3));
//#else
        //#unroll j 4: let w_$j = load_f32(w, w_at_$j + k);
        //#unroll p BLOCKS: let lo_$p = texel(x, 2u * (x_at_$p + k)); let hi_$p = texel(x, 2u * (x_at_$p + k) + 1u);
        //#unroll p BLOCKS, s SPAN: let v_$p_$s = eight_f32(subgroupBroadcast(lo_$p, $su), subgroupBroadcast(hi_$p, $su)); acc_$p_$s += vec4<f32>(dot8(v_$p_$s, w_0), dot8(v_$p_$s, w_1), dot8(v_$p_$s, w_2), dot8(v_$p_$s, w_3));
//#endif
    }
    //#unroll p BLOCKS, s SPAN: acc_$p_$s *= params.scale;
//#if LORA
    //#unroll j 4: let b_at_$j = params.b_texel0 + adapter_at(expert) + (4u * params.y_unit0 + c_$j) * params.r_stride;
    for (var k = 0u; k < params.r_units; k += 1u) {
        //#unroll j 4: let b_$j = bitcast<vec4<f32>>(texel(b, b_at_$j + k));
        //#unroll p BLOCKS: let u_$p = u[m_$p * params.r_stride + k];
        //#unroll p BLOCKS, s SPAN: let t_$p_$s = subgroupBroadcast(u_$p, $su); acc_$p_$s += vec4<f32>(dot(t_$p_$s, b_0), dot(t_$p_$s, b_1), dot(t_$p_$s, b_2), dot(t_$p_$s, b_3));
    }
//#endif
    // Rows are padded to units of eight.
    if (c0 < (params.columns + 7u) / 8u * 8u) {
        //#unroll p BLOCKS, s SPAN: if (m0 + $pu * SPAN + $su < rows) { store4(m0 + $pu * SPAN + $su, c0, acc_$p_$s); }
    }
}
