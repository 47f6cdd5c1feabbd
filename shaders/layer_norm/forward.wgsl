// y = (x - mean) · rstd · weight + bias,  rstd = 1 / √(mean((x - mean)²) + eps), over each row.
//
// x (rows, columns) float32, weight and bias (columns) float32, y (rows, columns) operand, stats
// (rows) of (mean, rstd); both outputs overwritten. Padding columns of x are zero and stay so.
// LANES invocations share a row. Launcher: ops/layer_norm.py.
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
@group(0) @binding(4) var<storage, read_write> stats: array<vec2<f32>>;
//#if BIAS
@group(0) @binding(5) var<storage, read> bias: array<vec4<f32>>;
//#endif

fn live(unit: u32) -> vec4<bool> {
    return vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.columns);
}

fn normed(at: u32, unit: u32, mean: f32, r: f32) -> vec4<f32> {
    var v = (x[at] - mean) * r * weight[unit];
//#if BIAS
    v += bias[unit];
//#endif
    return select(vec4<f32>(0.0), v, live(unit));
}

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min((group.y * groups.x + group.x) * ROWS + local.y, params.rows - 1u);
    let lane = local.x;
    let base = row * params.stride;
    var sum = 0.0;
    for (var i = lane; i < params.stride; i += LANES) {
        sum += dot(x[base + i], vec4<f32>(1.0));
    }
    let mean = reduce_sum(sum, lane) / f32(params.columns);
    var squares = 0.0;
    for (var i = lane; i < params.stride; i += LANES) {
        let v = select(vec4<f32>(0.0), x[base + i] - mean, live(i));
        squares += dot(v, v);
    }
    let r = inverseSqrt(reduce_sum(squares, lane) / f32(params.columns) + params.eps);
    for (var i = 2u * lane; i < params.stride; i += 2u * LANES) {
        store_y((base + i) / 2u, normed(base + i, i, mean, r), normed(base + i + 1u, i + 1u, mean, r));
    }
    if (lane == 0u) {
        stats[row] = vec2<f32>(mean, r);
    }
}
