// y = (x - mean) · rstd · weight + bias,  rstd = 1 / √(mean((x - mean)²) + eps), over each row.
//
// x, y (rows, columns), weight and bias (columns) float32, stats (rows) of (mean, rstd); both
// outputs overwritten. Padding columns of x are zero and stay so. THREADS invocations share a row.
// Launcher: ops/norms.py.
//#include common/row_reduce.wgsl
//#include common/columns.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 weight: 8 float32
//#output 3 y: 8
@group(0) @binding(4) var<storage, read_write> stats: array<vec2<f32>>;
//#input 5 bias?: 8 float32

fn centred(at: u32, unit: u32, mean: f32) -> Eight {
    let v = load_x(at);
    return live8(unit, Eight(v.even - mean, v.odd - mean));
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    var sum = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        let v = load_x(base + i);
        sum += dot(v.even + v.odd, vec4<f32>(1.0));
    }
    let mean = reduce_sum(sum, thread) / f32(params.columns);
    var squares = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        let v = centred(base + i, i, mean);
        squares += dot8(v, v);
    }
    let r = inverseSqrt(reduce_sum(squares, thread) / f32(params.columns) + params.eps);
    for (var i = thread; i < params.stride; i += THREADS) {
        let v = multiply8(scale8(centred(base + i, i, mean), r), load_weight(i));
        store_y(base + i, add8(v, load_bias(i)));
    }
    if (thread == 0u) {
        stats[row] = vec2<f32>(mean, r);
    }
}
