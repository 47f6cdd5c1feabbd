// lse_delta = (lse, delta), delta = do·o, per query and head: attention/delta.wgsl with o and dout
// in images, heads of TEXELS texels. Launcher: ops/attention_image.py.
//#include common/flat.wgsl
//#include common/texel_values.wgsl

struct Params {
    rows: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var o: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var dout: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> lse_delta: array<vec2<f32>>;

fn each(i: u32) {
    let row = i / HEADS;
    if (row >= params.rows) {
        return;
    }
    let base = row * params.stride + (i % HEADS) * TEXELS;
    var sum = 0.0;
    //#unroll t TEXELS: sum += dot_values(values(texel(o, base + $tu)), values(texel(dout, base + $tu)));
    lse_delta[i] = vec2<f32>(lse[i], sum);
}
