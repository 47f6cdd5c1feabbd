// lse_delta = (lse, delta), delta = do·o, per query and head: what softmax's gradient needs.
//
// o, dout (rows, heads · head_dim) operands, lse (rows, heads) float32, lse_delta (rows, heads) of
// pairs, overwritten; one buffer, since eight are all that every adapter can bind.
// Launcher: ops/attention.py.
//#include common/flat.wgsl
//#include common/head_unit.wgsl

struct Params {
    rows: u32,
    heads: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> o: array<HeadUnit>;
@group(0) @binding(2) var<storage, read> dout: array<HeadUnit>;
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> lse_delta: array<vec2<f32>>;

fn each(i: u32) {
    let row = i / params.heads;
    if (row >= params.rows) {
        return;
    }
    let base = row * params.stride + (i % params.heads) * UNITS;
    var sum = 0.0;
    //#unroll d UNITS: sum += dot(unpack_head(o[base + $du]), unpack_head(dout[base + $du]));
    lse_delta[i] = vec2<f32>(lse[i], sum);
}
