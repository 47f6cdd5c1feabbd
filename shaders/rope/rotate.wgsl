// Rotary position embedding of every head of x, in Hugging Face's half-split form:
//
// y[d] = x[d] · cos - sign · x[d + half] · sin        d < half
// y[d] = x[d] · cos + sign · x[d - half] · sin        half ≤ d < rotary_dim;  y[d] = x[d] beyond
// or with INTERLEAVED on the pairs (2i, 2i + 1) instead of (i, i + half).
//
// x, y (rows, heads · head_dim) operand, y overwritten, padding with zeros; positions (rows);
// table (positions, half) of (cos, sin). sign +1 rotates, -1 is the inverse and the gradient.
// Each invocation writes two neighbouring elements. Launcher: ops/rope.py.
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
//#if BF16
//#include common/bfloat16.wgsl
@group(0) @binding(3) var<storage, read> x: array<u32>;
@group(0) @binding(4) var<storage, read_write> y: array<u32>;

fn load(element: u32) -> f32 {
    let word = x[element / 2u];
    return bitcast<f32>(select(word & 0xffff0000u, word << 16u, element % 2u == 0u));
}

fn pack2(v: vec2<f32>) -> u32 {
    return pack_bf16(vec4<f32>(v, 0.0, 0.0)).x;
}
//#else
@group(0) @binding(3) var<storage, read> x: array<f32>;
@group(0) @binding(4) var<storage, read_write> y: array<vec2<f32>>;

fn load(element: u32) -> f32 {
    return x[element];
}

fn pack2(v: vec2<f32>) -> vec2<f32> {
    return v;
}
//#endif

fn rotated(base: u32, column: u32, position: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    let d = column % params.head_dim;
    let here = load(base + column);
    if (d >= params.rotary_dim) {
        return here;
    }
    let half = params.rotary_dim / 2u;
//#if INTERLEAVED
    let pair = table[position * half + d / 2u];
    let other = load(base + column + 1u - 2u * (d % 2u));
    return here * pair.x + select(-params.sign, params.sign, d % 2u == 1u) * other * pair.y;
//#else
    if (d < half) {
        let t = table[position * half + d];
        return here * t.x - params.sign * load(base + column + half) * t.y;
    }
    let t = table[position * half + d - half];
    return here * t.x + params.sign * load(base + column - half) * t.y;
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
    y[i] = pack2(vec2<f32>(rotated(base, column, position), rotated(base, column + 1u, position)));
}
