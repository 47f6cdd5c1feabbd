// y = x · rstd · weight (+ residual),  rstd = 1 / √(mean(x²) + eps), over each row.
//
// x, residual, y (rows, columns), weight (columns), rstd (rows) float32; both outputs overwritten.
// Padding columns of x are zero and stay so. THREADS invocations share a row.
// Launcher: ops/rms_norm.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 weight: 8 float32
//#output 3 y: 8
@group(0) @binding(4) var<storage, read_write> rstd: array<f32>;
//#input 5 residual?: 8

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    var sum = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        let v = load_x(base + i);
        sum += dot8(v, v);
    }
    let r = inverseSqrt(reduce_sum(sum, thread) / f32(params.columns) + params.eps);
    for (var i = thread; i < params.stride; i += THREADS) {
        var v = multiply8(scale8(load_x(base + i), r), load_weight(i));
//#if residual
        v = add8(v, load_residual(base + i));
//#endif
        store_y(base + i, v);
    }
    if (thread == 0u) {
        rstd[row] = r;
    }
}
