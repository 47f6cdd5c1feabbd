// du[m, j] = scale · Σ_n dy[m, n] · b[n, j]
//
// dy (rows, N) operand and b (N, r) float32 are images, du (rows, r) float32 is overwritten. Each
// invocation holds two rows of dy; eight ranks of eight rows of b are loaded by the subgroup and
// broadcast. dy starts at dy_unit0 and b at b_unit0 (units of eight). Launcher: ops/gemm_image.py.
//#include common/image8.wgsl

struct Params {
    rows: u32,
    r: u32,
    n: u32,
    dy_unit0: u32,
    dy_stride: u32,
    b_unit0: u32,
    b_stride: u32,
    du_stride: u32,
    scale: f32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var dy: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var b: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var<storage, read_write> du: array<vec4<f32>>;

//#include common/experts.wgsl

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let m0 = (group.x * LANES + local.x) * 2u;
    // The workgroup's rows are in one tile; the first one's number is the same for all of them.
    let expert = expert_of(group.x * LANES * 2u);
    if (!is_here(expert)) {
        return;
    }
    let last = params.n - 1u;
    //#unroll i 2: let at_$i = params.dy_unit0 + min(m0 + $iu, params.rows - 1u) * params.dy_stride;
    //#unroll i 2: var lo_$i = vec4<f32>(0.0); var hi_$i = vec4<f32>(0.0);
    for (var n = 0u; n < params.n; n += 8u) {
//#if BF16
        //#unroll i 2: let d_$i = load_bf16(dy, at_$i + n / 8u);
//#else
        //#unroll i 2: let d_$i = load_f32(dy, at_$i + n / 8u);
//#endif
        // Rows of b past the last meet zeros in dy's padding.
        //#unroll p BLOCKS: let b_at_$p = 2u * (params.b_unit0 + adapter_at(expert) + min(n + $pu * SPAN + local.x % SPAN, last) * params.b_stride + group.y); let b_lo_$p = bitcast<vec4<f32>>(texel(b, b_at_$p)); let b_hi_$p = bitcast<vec4<f32>>(texel(b, b_at_$p + 1u));
        //#unroll p BLOCKS, s SPAN: { let v_lo = subgroupBroadcast(b_lo_$p, $su); let v_hi = subgroupBroadcast(b_hi_$p, $su); let t = $pu * SPAN + $su; let d0 = pick(d_0, t); let d1 = pick(d_1, t); lo_0 += d0 * v_lo; hi_0 += d0 * v_hi; lo_1 += d1 * v_lo; hi_1 += d1 * v_hi; }
    }
    //#unroll i 2: if (m0 + $iu < params.rows) { let at = (m0 + $iu) * params.du_stride + 2u * group.y; du[at] = live(lo_$i, 8u * group.y); du[at + 1u] = live(hi_$i, 8u * group.y + 4u); }
}

// Element t of eight, t known when compiling.
fn pick(v: Eight, t: u32) -> f32 {
    return select(v.even[t / 2u], v.odd[t / 2u], t % 2u == 1u);
}

fn live(v: vec4<f32>, j: u32) -> vec4<f32> {
    return select(vec4<f32>(0.0), v * params.scale, vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.r));
}
