// du[m, j] = scale · Σ_n dy[m, n] · b[n, j]
//
// dy (rows, N) operand, N padded with zeros to units of eight; b (N, r) float32; du (rows, r)
// float32, overwritten, its padding with zeros. A workgroup makes 4 rows by 8 ranks, its
// invocations sharing the sum over n: for GPUs. Launcher: ops/lora.py.
//#include common/unit8.wgsl
//#include common/lane_sums.wgsl

const SUMS = 32u;

struct Params {
    rows: u32,
    r: u32,
    n: u32,
    dy_stride: u32,
    b_stride: u32,
    du_stride: u32,
    scale: f32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> dy: array<Unit8>;
@group(0) @binding(2) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> du: array<f32>;

//#include common/experts.wgsl

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let m0 = group.x * 4u;
    let unit = group.y * 2u;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    let b0 = adapter_at(expert) + unit;
    // Ranks are padded to units of eight, so there are two units of four.
    //#unroll i 4: let dy_$i = min(m0 + $iu, params.rows - 1u) * params.dy_stride;
    //#unroll i 4: var lo_$i = vec4<f32>(0.0); var hi_$i = vec4<f32>(0.0);
    let last = params.n - 1u;
    for (var k = lane; k < params.dy_stride; k += LANES) {
        //#unroll i 4: let dyl_$i = lo8(dy[dy_$i + k]); let dyh_$i = hi8(dy[dy_$i + k]);
        // Rows of b past the last meet zeros in dy's padding.
        //#unroll n 4: { let at = min(8u * k + $nu, last) * params.b_stride + b0; let b_lo = b[at]; let b_hi = b[at + 1u]; lo_0 += dyl_0[$nu] * b_lo; hi_0 += dyl_0[$nu] * b_hi; lo_1 += dyl_1[$nu] * b_lo; hi_1 += dyl_1[$nu] * b_hi; lo_2 += dyl_2[$nu] * b_lo; hi_2 += dyl_2[$nu] * b_hi; lo_3 += dyl_3[$nu] * b_lo; hi_3 += dyl_3[$nu] * b_hi; }
        //#unroll n 4: { let at = min(8u * k + 4u + $nu, last) * params.b_stride + b0; let b_lo = b[at]; let b_hi = b[at + 1u]; lo_0 += dyh_0[$nu] * b_lo; hi_0 += dyh_0[$nu] * b_hi; lo_1 += dyh_1[$nu] * b_lo; hi_1 += dyh_1[$nu] * b_hi; lo_2 += dyh_2[$nu] * b_lo; hi_2 += dyh_2[$nu] * b_hi; lo_3 += dyh_3[$nu] * b_lo; hi_3 += dyh_3[$nu] * b_hi; }
    }
    //#unroll i 4, j 4: put_partial(lane, $iu * 8u + $ju, lo_$i[$ju]); put_partial(lane, $iu * 8u + 4u + $ju, hi_$i[$ju]);
    workgroupBarrier();
    for (var i = lane; i < SUMS; i += LANES) {
        let m = m0 + i / 8u;
        let j = group.y * 8u + i % 8u;
        if (m < params.rows && j < params.du_stride) {
            du[m * params.du_stride + j] = select(0.0, params.scale * total(i), j < params.r);
        }
    }
}
