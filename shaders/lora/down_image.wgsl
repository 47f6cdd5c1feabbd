// u[m, j] = scale · Σ_k mask(x)[m, k] · a[j, k]
//
// x (rows, K) operand and a (r, K) float32 are images, u (rows, r) float32 is overwritten. Each
// invocation holds four rows of x; the ranks of a (BLOCKS · SPAN of them) are loaded one by each
// invocation of the subgroup and broadcast. x starts at x_unit0 and a at a_unit0 (units of eight).
// Launcher: ops/gemm_image.py.
//#include common/image8.wgsl

struct Params {
    rows: u32,
    r: u32,
    k_units: u32,
    x_unit0: u32,
    x_stride: u32,
    a_unit0: u32,
    a_stride: u32,
    u_stride: u32,
    scale: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var x: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var a: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var<storage, read_write> u: array<f32>;
//#if DROPOUT
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/dropout.wgsl
fn masked(v: Eight, row: u32, k: u32) -> Eight {
    let i = (row * params.x_stride + k) * 8u;
    let lo = dropout_mask4(i);
    let hi = dropout_mask4(i + 4u);
    return Eight(v.even * vec4<f32>(lo.xz, hi.xz), v.odd * vec4<f32>(lo.yw, hi.yw));
}
//#endif

//#include common/experts.wgsl

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let m0 = (group.x * LANES + local.x) * 4u;
    let j0 = group.y * (BLOCKS * SPAN);
    // The workgroup's rows are in one tile; the first one's number is the same for all of them.
    let expert = expert_of(group.x * LANES * 4u);
    if (!is_here(expert)) {
        return;
    }
    //#unroll i 4: let m_$i = min(m0 + $iu, params.rows - 1u); let x_at_$i = params.x_unit0 + m_$i * params.x_stride;
    //#unroll p BLOCKS: let a_at_$p = params.a_unit0 + min(j0 + $pu * SPAN + local.x % SPAN, params.r - 1u) * params.a_stride + adapter_at(expert);
    //#unroll p BLOCKS, s SPAN: var acc_$p_$s = vec4<f32>(0.0);
    for (var k = 0u; k < params.k_units; k += 1u) {
//#if BF16
        //#unroll i 4: var x_$i = load_bf16(x, x_at_$i + k);
//#else
        //#unroll i 4: var x_$i = load_f32(x, x_at_$i + k);
//#endif
//#if DROPOUT
        //#unroll i 4: x_$i = masked(x_$i, m_$i, k);
//#endif
        //#unroll p BLOCKS: let lo_$p = texel(a, 2u * (a_at_$p + k)); let hi_$p = texel(a, 2u * (a_at_$p + k) + 1u);
        //#unroll p BLOCKS, s SPAN: let v_$p_$s = eight_f32(subgroupBroadcast(lo_$p, $su), subgroupBroadcast(hi_$p, $su)); acc_$p_$s += vec4<f32>(dot8(v_$p_$s, x_0), dot8(v_$p_$s, x_1), dot8(v_$p_$s, x_2), dot8(v_$p_$s, x_3));
    }
    // acc_p_s: four rows of rank j0 + p · SPAN + s. Padding ranks become zero.
    //#unroll p BLOCKS, s SPAN: store(m0, j0 + $pu * SPAN + $su, acc_$p_$s * params.scale);
}

fn store(m: u32, j: u32, value: vec4<f32>) {
    if (j < params.u_stride) {
        let v = select(vec4<f32>(0.0), value, j < params.r);
        let at = m * params.u_stride + j;
        //#unroll i 4: if (m + $iu < params.rows) { u[at + $iu * params.u_stride] = v[$i]; }
    }
}
