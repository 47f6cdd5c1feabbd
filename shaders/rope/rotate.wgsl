// Rotary position embedding of every head of x, in Hugging Face's half-split form:
//
// y[d] = x[d] · cos - sign · x[d + half] · sin        d < half
// y[d] = x[d] · cos + sign · x[d - half] · sin        half ≤ d < rotary_dim;  y[d] = x[d] beyond
// or with INTERLEAVED on the pairs (2i, 2i + 1) instead of (i, i + half).
//
// x, y (rows, heads · head_dim), y overwritten, padding with zeros; positions (rows); table
// (positions, half) of (cos, sin). sign +1 rotates, -1 is the inverse and the gradient.
// Each invocation writes two neighbouring elements. Launcher: kernels/rope.py.
//#include common/flat.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
    head_dim: u32,
    rotary_dim: u32,
    sign: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>;
//#input 3 x: 1
//#output 4 y: 2

fn rotated(base: u32, column: u32, position: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    let d = column % params.head_dim;
    let here = load_x(base + column);
    if (d >= params.rotary_dim) {
        return here;
    }
    let half = params.rotary_dim / 2u;
//#if INTERLEAVED
    let pair = table[position * half + d / 2u];
    let other = load_x(base + column + 1u - 2u * (d % 2u));
    return here * pair.x + select(-params.sign, params.sign, d % 2u == 1u) * other * pair.y;
//#else
    if (d < half) {
        let t = table[position * half + d];
        return here * t.x - params.sign * load_x(base + column + half) * t.y;
    }
    let t = table[position * half + d - half];
    return here * t.x + params.sign * load_x(base + column - half) * t.y;
//#endif
}

fn each(i: u32) {
    let pairs = params.stride / 2u;
    let row = i / pairs;
    if (row >= params.rows) {
        return;
    }
    let column = 2u * (i % pairs);
    let base = row * params.stride;
    let position = positions[row];
    store_y(i, vec2<f32>(rotated(base, column, position), rotated(base, column + 1u, position)));
}
