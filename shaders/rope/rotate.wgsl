// Rotary position embedding of every head of x, in Hugging Face's half-split form:
//
// y[d] = x[d] · cos - sign · x[d + half] · sin        d < half
// y[d] = x[d] · cos + sign · x[d - half] · sin        half ≤ d < rotary_dim;  y[d] = x[d] beyond
// or with INTERLEAVED on the pairs (2i, 2i + 1) instead of (i, i + half).
//
// x, y (rows, heads · head_dim), y overwritten, padding with zeros; positions (rows); table
// (positions, half) of (cos, sin). sign +1 rotates, -1 is the inverse and the gradient. x1 and y1, if
// bound, are rotated alike. Each invocation writes two neighbouring elements, those of y first.
// Launcher: kernels/rope.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
    columns1: u32,
    stride1: u32,
    head_dim: u32,
    rotary_dim: u32,
    sign: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>;
//#input 3 x: 1
//#output 4 y: 2
//#input 5 x1?: 1
//#output 6 y1?: 2

// What an element of a head is multiplied by, and where its partner is and what that is multiplied
// by; beyond the rotated elements there is none.
struct Turn {
    own: f32,
    other: f32,
    partner: u32,
}

fn turn(at: u32, d: u32, position: u32) -> Turn {
    if (d >= params.rotary_dim) {
        return Turn(1.0, 0.0, at);
    }
    let half = params.rotary_dim / 2u;
//#if INTERLEAVED
    let pair = table[position * half + d / 2u];
    let sign = select(-params.sign, params.sign, d % 2u == 1u);
    return Turn(pair.x, sign * pair.y, at + 1u - 2u * (d % 2u));
//#else
    if (d < half) {
        let t = table[position * half + d];
        return Turn(t.x, -params.sign * t.y, at + half);
    }
    let t = table[position * half + d - half];
    return Turn(t.x, params.sign * t.y, at - half);
//#endif
}

fn rotated(base: u32, column: u32, position: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    let at = base + column;
    let t = turn(at, column % params.head_dim, position);
    let here = load_x(at);
    if (t.partner == at) {
        return here;
    }
    return here * t.own + t.other * load_x(t.partner);
}

fn each(i: u32) {
    let pairs = params.stride / 2u;
    let row = i / pairs;
    if (row < params.rows) {
        let column = 2u * (i % pairs);
        let base = row * params.stride;
        let position = positions[row];
        store_y(i, vec2<f32>(rotated(base, column, position), rotated(base, column + 1u, position)));
        return;
    }
//#if x1
    each1(i - params.rows * pairs);
//#endif
}
//#if x1

fn rotated1(base: u32, column: u32, position: u32) -> f32 {
    if (column >= params.columns1) {
        return 0.0;
    }
    let at = base + column;
    let t = turn(at, column % params.head_dim, position);
    let here = load_x1(at);
    if (t.partner == at) {
        return here;
    }
    return here * t.own + t.other * load_x1(t.partner);
}

fn each1(i: u32) {
    let pairs = params.stride1 / 2u;
    let row = i / pairs;
    if (row < params.rows) {
        let column = 2u * (i % pairs);
        let base = row * params.stride1;
        let position = positions[row];
        store_y1(i, vec2<f32>(rotated1(base, column, position), rotated1(base, column + 1u, position)));
    }
}
//#endif
