// y = x · rstd · weight,  rstd = 1 / √(mean(x²) + eps), over each head of each row.
//
// x, y (rows, heads · head_dim), weight (head_dim). y is overwritten, its padding with zeros.
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
//#output 3 y: 2

fn each(i: u32) {
    let row = i / params.heads;
    if (row >= params.rows) {
        return;
    }
    let head = i % params.heads;
    let base = row * params.stride + head * params.head_dim;
    var sum = 0.0;
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let v = load_x(base + d);
        sum += v.x * v.x;
        sum += v.y * v.y;
    }
    let r = inverseSqrt(sum / f32(2u * params.head_dim) + params.eps);
    for (var d = 0u; d < params.head_dim; d += 1u) {
        store_y(base + d, r * (load_x(base + d) * load_weight(d)));
    }
    if (head == params.heads - 1u) {
        for (var at = base + params.head_dim; at < (row + 1u) * params.stride; at += 1u) {
            store_y(at, vec2<f32>(0.0));
        }
    }
}
