// u[m, j] = scale · Σ_k mask[m, k] · x[m, k] · a[j, k]
//
// x (rows, K) operand, a (r, K) float32, K padded with zeros to units of eight; u (rows, r)
// float32, overwritten, its padding with zeros. A workgroup makes 4 rows by 8 ranks, its
// invocations sharing the sum over k: for GPUs. Launcher: ops/lora.py.
//#include common/unit8.wgsl
//#include common/lane_sums.wgsl

const SUMS = 32u;

struct Params {
    rows: u32,
    r: u32,
    k_units: u32,
    u_stride: u32,
    scale: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
}

struct Float8 {
    lo: vec4<f32>,
    hi: vec4<f32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Unit8>;
@group(0) @binding(2) var<storage, read> a: array<Float8>;
@group(0) @binding(3) var<storage, read_write> u: array<f32>;
//#if DROPOUT
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/dropout.wgsl
//#endif

//#include common/experts.wgsl

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let m0 = group.x * 4u;
    let j0 = group.y * 8u;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    //#unroll i 4: let x_$i = min(m0 + $iu, params.rows - 1u) * params.k_units;
    //#unroll j 8: let a_$j = min(j0 + $ju, params.r - 1u) * params.k_units + adapter_at(expert);
    //#unroll i 4, j 8: var sum_$i_$j = 0.0;
    for (var k = lane; k < params.k_units; k += LANES) {
        //#unroll i 4: var lo_$i = lo8(x[x_$i + k]); var hi_$i = hi8(x[x_$i + k]);
//#if DROPOUT
        //#unroll i 4: lo_$i *= dropout_mask4(8u * (x_$i + k)); hi_$i *= dropout_mask4(8u * (x_$i + k) + 4u);
//#endif
        //#unroll j 8: let v_$j = a[a_$j + k];
        //#unroll i 4, j 8: sum_$i_$j += dot(lo_$i, v_$j.lo) + dot(hi_$i, v_$j.hi);
    }
    //#unroll i 4, j 8: put_partial(lane, $iu * 8u + $ju, sum_$i_$j);
    workgroupBarrier();
    for (var i = lane; i < SUMS; i += LANES) {
        let m = m0 + i / 8u;
        let j = j0 + i % 8u;
        if (m < params.rows && j < params.u_stride) {
            u[m * params.u_stride + j] = select(0.0, params.scale * total(i), j < params.r);
        }
    }
}
