// dx = rstd · (g - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = x · rstd, over each head of each row.
//
// dy, x, dx (rows, heads · head_dim), weight (head_dim). dx is overwritten, its padding with zeros.
// head_dim and stride count pairs. One invocation takes a head. Launcher: ops/pointwise.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    heads: u32,
    head_dim: u32,
    stride: u32, //= x.stride
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
    var squares = 0.0;
    var products = 0.0;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let v = load_x(base + d);
        let product = load_dy(base + d) * load_weight(d) * v;
        squares += v.x * v.x;
        squares += v.y * v.y;
        products += product.x;
        products += product.y;
    }
    let r = inverseSqrt(squares / f32(2u * params.head_dim) + params.eps);
    let mean = r * r * products / f32(2u * params.head_dim);
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let g = load_dy(base + d) * load_weight(d);
        store_dx(base + d, r * (g - load_x(base + d) * mean));
    }
    if (head == params.heads - 1u) {
        for (var at = base + params.head_dim; at < (row + 1u) * params.stride; at += 1u) {
            store_dx(at, vec2<f32>(0.0));
        }
    }
}
