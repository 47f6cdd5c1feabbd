// rope/rotate.wgsl for software adapters: y is an image, x (X_IMAGE) may be one, heads are whole
// texels and so are their rotated halves.
//
// x, y: rows of stride texels, heads of HEAD texels, of which the first 2 · HALF are rotated; table
// an image of (cos, sin) float32 pairs, half a head's to a position. sign +1 rotates, -1 is the
// inverse and the gradient. Each invocation writes one texel of each half, or one beyond them.
// Launcher: ops/rope.py.
//#include common/flat.wgsl
//#include common/texel_values.wgsl

struct Params {
    rows: u32,
    stride: u32,
    sign: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
@group(0) @binding(2) var table: texture_storage_2d<rgba32uint, read>;
//#if X_IMAGE
@group(0) @binding(3) var x: texture_storage_2d<rgba32uint, read>;
fn load(i: u32) -> vec4<u32> {
    return texel(x, i);
}
//#else
@group(0) @binding(3) var<storage, read> x: array<vec4<u32>>;
fn load(i: u32) -> vec4<u32> {
    return x[i];
}
//#endif
@group(0) @binding(4) var y: texture_storage_2d<rgba32uint, write>;

// (cos, sin) pairs of one texel's elements, the angle's sign applied.
struct Turn {
    cos: Values,
    sin: Values,
}

fn turn(position: u32, t: u32) -> Turn {
//#if BF16
    let at = (position * HALF + t) * 4u;
    let a = bitcast<vec4<f32>>(texel(table, at));
    let b = bitcast<vec4<f32>>(texel(table, at + 1u));
    let c = bitcast<vec4<f32>>(texel(table, at + 2u));
    let d = bitcast<vec4<f32>>(texel(table, at + 3u));
    return Turn(
        Eight(vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(a.z, b.z, c.z, d.z)),
        Eight(params.sign * vec4<f32>(a.y, b.y, c.y, d.y), params.sign * vec4<f32>(a.w, b.w, c.w, d.w)),
    );
//#else
    let at = (position * HALF + t) * 2u;
    let a = bitcast<vec4<f32>>(texel(table, at));
    let b = bitcast<vec4<f32>>(texel(table, at + 1u));
    return Turn(vec4<f32>(a.xz, b.xz), params.sign * vec4<f32>(a.yw, b.yw));
//#endif
}

fn times(a: Values, b: Values) -> Values {
//#if BF16
    return Eight(a.even * b.even, a.odd * b.odd);
//#else
    return a * b;
//#endif
}

fn each(i: u32) {
    let each = HEAD - HALF;
    let row = i / (HEADS * each);
    if (row >= params.rows) {
        return;
    }
    let head = i / each % HEADS;
    let t = i % each;
    let base = row * params.stride + head * HEAD;
    if (t < HALF) {
        let by = turn(positions[row], t);
        let first = values(load(base + t));
        let second = values(load(base + HALF + t));
        textureStore(y, place(base + t), to_texel(add_scaled(times(first, by.cos), -1.0, times(second, by.sin))));
        textureStore(y, place(base + HALF + t), to_texel(add_scaled(times(second, by.cos), 1.0, times(first, by.sin))));
    } else {
        textureStore(y, place(base + HALF + t), load(base + HALF + t));
    }
}
