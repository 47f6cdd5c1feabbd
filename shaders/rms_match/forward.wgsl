// y = x · √(mean(like²) / max(mean(x²), floor)) (+ residual), over each row.
//
// x, like, residual, y (rows, columns); y is overwritten, zero padding stays zero. THREADS
// invocations share a row. Launcher: ops/altup.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
    floor: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 like: 8
//#input 3 residual?: 8
//#output 4 y: 8

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    var of_x = 0.0;
    var of_like = 0.0;
    for (var u = thread; u < params.stride; u += THREADS) {
        let x = load_x(base + u);
        let like = load_like(base + u);
        of_x += dot8(x, x);
        of_like += dot8(like, like);
    }
    let size = reduce_sum(of_x, thread) / f32(params.columns);
    let wanted = reduce_sum(of_like, thread) / f32(params.columns);
    let factor = sqrt(wanted / max(size, params.floor));
    for (var u = thread; u < params.stride; u += THREADS) {
        store_y(base + u, add_scaled8(load_residual(base + u), factor, load_x(base + u)));
    }
}
