// y = (x - mean) · rstd · weight + bias,  rstd = 1 / √(mean((x - mean)²) + eps), over each head of
// each row.
//
// x, y (rows, heads · head_dim), weight and bias (heads, head_dim); all heads have the same with a
// weight_stride of 0. y is overwritten, its padding with zeros. head_dim and strides count pairs. One
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
//#output 3 y: 2
//#input 5 bias?: 2 float32

fn each(i: u32) {
    let row = i / params.heads;
    if (row >= params.rows) {
        return;
    }
    let head = i % params.heads;
    let base = row * params.stride + head * params.head_dim;
    let weights = head * params.weight_stride;
    let statistics = head_statistics(base);
    for (var d = 0u; d < params.head_dim; d += 1u) {
        let normed = (load_x(base + d) - statistics.x) * statistics.y;
        var value = normed * load_weight(weights + d);
//#if bias
        value += load_bias(weights + d);
//#endif
        store_y(base + d, value);
    }
    if (head == params.heads - 1u) {
        for (var at = base + params.head_dim; at < (row + 1u) * params.stride; at += 1u) {
            store_y(at, vec2<f32>(0.0));
        }
    }
}
