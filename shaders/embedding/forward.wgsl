// y[m, :] = scale · weight[ids[m] - row0, :]  for the ids that lie in this shard of rows.
//
// ids (rows), weight (shard_rows, ·) operand, y (rows, ·) float32: overwritten where the id is in
// the shard, left alone elsewhere, so the shards' dispatches complete each other.
// With IMAGE weight is an image, from texel0 on. Launcher: ops/embedding.py.
//#include common/flat.wgsl
//#include common/unit4.wgsl

struct Params {
    rows: u32,
    stride: u32,
    row0: u32,
    shard_rows: u32,
    texel0: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
//#if IMAGE
@group(0) @binding(2) var weight: texture_storage_2d<rgba32uint, read>;

fn four(i: u32) -> vec4<f32> {
//#if BF16
    let at = params.texel0 + i / 2u;
    let texel = textureLoad(weight, vec2<u32>(at & 1023u, at >> 10u));
    return unpack4(select(texel.xy, texel.zw, i % 2u == 1u));
//#else
    let at = params.texel0 + i;
    return bitcast<vec4<f32>>(textureLoad(weight, vec2<u32>(at & 1023u, at >> 10u)));
//#endif
}
//#else
@group(0) @binding(2) var<storage, read> weight: array<Unit4>;

fn four(i: u32) -> vec4<f32> {
    return unpack4(weight[i]);
}
//#endif
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let id = ids[m];
    if (id >= params.row0 && id - params.row0 < params.shard_rows) {
        y[i] = params.scale * four((id - params.row0) * params.stride + i % params.stride);
    }
}
