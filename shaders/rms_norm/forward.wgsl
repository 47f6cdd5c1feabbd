// y = x · rstd · weight (+ residual, with RESIDUAL, y and residual float32 then),
//  rstd = 1 / √(mean(x²) + eps), over each row.
//
// x (rows, columns) float32, weight (columns) float32, y (rows, columns) operand, rstd (rows)
// float32; both outputs overwritten. Padding columns of x are zero and stay so.
// LANES invocations share a row. Launcher: ops/rms_norm.py.
//#include common/operand_out.wgsl OPERAND=y OPERAND_BINDING=3
//#include common/row_reduce.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> rstd: array<f32>;
//#if RESIDUAL
@group(0) @binding(5) var<storage, read> residual: array<vec4<f32>>;
//#endif

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min((group.y * groups.x + group.x) * ROWS + local.y, params.rows - 1u);
    let lane = local.x;
    let base = row * params.stride;
    var sum = 0.0;
    for (var i = lane; i < params.stride; i += LANES) {
        let v = x[base + i];
        sum += dot(v, v);
    }
    let r = inverseSqrt(reduce_sum(sum, lane) / f32(params.columns) + params.eps);
    for (var i = 2u * lane; i < params.stride; i += 2u * LANES) {
        let lo = x[base + i] * r * weight[i];
        let hi = x[base + i + 1u] * r * weight[i + 1u];
//#if RESIDUAL
        store_y((base + i) / 2u, lo + residual[base + i], hi + residual[base + i + 1u]);
//#else
        store_y((base + i) / 2u, lo, hi);
//#endif
    }
    if (lane == 0u) {
        rstd[row] = r;
    }
}
