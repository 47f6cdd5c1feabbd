// dx = rstd · (g - mean(g) - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = (x - mean) · rstd, over each
// head of each row.
//
// dy, x, dx (rows, heads · head_dim), weight (heads, head_dim), or of all heads the same with a
// weight_stride of 0. dx is overwritten, its padding with zeros. head_dim and strides count pairs. One
// invocation takes a head. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/head_statistics.wgsl

struct Params {
    rows: u32, //= x.rows
    heads: u32,
    head_dim: u32,
    stride: u32, //= x.stride
    weight_stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 2
//#input 2 weight: 2 float32
//#output 3 dx: 2
//#input 4 dy: 2

fn each(i: u32) {
    let row = i / params.heads;
    if (row >= params.rows) {
        return;
    }
    let head = i % params.heads;
    let base = row * params.stride + head * params.head_dim;
    let weights = head * params.weight_stride;
    let statistics = head_statistics(base);
    let mean = statistics.x;
    let r = statistics.y;
    var sum = 0.0;
    var product = 0.0;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let g = load_dy(base + d) * load_weight(weights + d);
        sum += g.x + g.y;
        product += dot(g, load_x(base + d) - mean);
    }
    let count = f32(2u * params.head_dim);
    let g_mean = sum / count;
    let gx_mean = r * r * product / count;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let g = load_dy(base + d) * load_weight(weights + d);
        store_dx(base + d, r * (g - g_mean - (load_x(base + d) - mean) * gx_mean));
    }
    if (head == params.heads - 1u) {
        for (var at = base + params.head_dim; at < (row + 1u) * params.stride; at += 1u) {
            store_dx(at, vec2<f32>(0.0));
        }
    }
}
