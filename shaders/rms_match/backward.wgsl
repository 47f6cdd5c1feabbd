// The gradients of rms_match/forward.wgsl: with s = √max(mean(x²), floor), t = √mean(like²) and
// p = mean(dy · x), dx = t / s · (dy - x · p / s²), without the last term where mean(x²) < floor,
// and dlike = like · p / (s · t), or zero where t is.
//
// x, like, dy, dx, dlike (rows, columns); both outputs overwritten. THREADS invocations share a row.
// Launcher: ops/altup.py.
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
//#input 3 dy: 8
//#output 4 dx: 8
//#output 5 dlike: 8

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    var of_x = 0.0;
    var of_like = 0.0;
    var product = 0.0;
    for (var u = thread; u < params.stride; u += THREADS) {
        let x = load_x(base + u);
        let like = load_like(base + u);
        of_x += dot8(x, x);
        of_like += dot8(like, like);
        product += dot8(load_dy(base + u), x);
    }
    let size = reduce_sum(of_x, thread) / f32(params.columns);
    let wanted = sqrt(reduce_sum(of_like, thread) / f32(params.columns));
    let p = reduce_sum(product, thread) / f32(params.columns);
    let s = sqrt(max(size, params.floor));
    let factor = wanted / s;
    let of_size = select(-factor * p / (s * s), 0.0, size < params.floor);
    var of_wanted = 0.0;
    if (wanted > 0.0) {
        of_wanted = p / (s * wanted);
    }
    for (var u = thread; u < params.stride; u += THREADS) {
        let dy = load_dy(base + u);
        store_dx(base + u, add_scaled8(scale8(dy, factor), of_size, load_x(base + u)));
        store_dlike(base + u, scale8(load_like(base + u), of_wanted));
    }
}
