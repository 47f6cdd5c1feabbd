// dx = rstd · (g - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = x · rstd, over each head of each row.
//
// dy, x, dx (rows, heads · head_dim) operands, head_dim even; weight (head_dim) float32. dx (here
// y) is overwritten, its padding with zeros. One invocation takes a head. Launcher:
// ops/head_norm.py.
//#include common/flat.wgsl
//#include common/element_io.wgsl X_BINDING=1 Y_BINDING=3

struct Params {
    rows: u32,
    heads: u32,
    head_dim: u32,
    stride: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
//#if BF16
@group(0) @binding(4) var<storage, read> dy: array<u32>;

fn load_dy(element: u32) -> f32 {
    let word = dy[element / 2u];
    return bitcast<f32>(select(word & 0xffff0000u, word << 16u, element % 2u == 0u));
}
//#else
@group(0) @binding(4) var<storage, read> dy: array<f32>;

fn load_dy(element: u32) -> f32 {
    return dy[element];
}
//#endif

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
        squares += v * v;
        products += load_dy(base + d) * weight[d] * v;
    }
    let r = inverseSqrt(squares / f32(params.head_dim) + params.eps);
    let mean = r * r * products / f32(params.head_dim);
    for (var d = 0u; d < params.head_dim; d += 2u) {
        let at = base + d;
        let lo = load_dy(at) * weight[d] - load_x(at) * mean;
        let hi = load_dy(at + 1u) * weight[d + 1u] - load_x(at + 1u) * mean;
        store_y(at / 2u, r * vec2<f32>(lo, hi));
    }
    if (head == params.heads - 1u) {
        for (var at = base + params.head_dim; at < (row + 1u) * params.stride; at += 2u) {
            store_y(at / 2u, vec2<f32>(0.0));
        }
    }
}
