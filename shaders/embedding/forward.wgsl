// y[m, :] = scale · weight[ids[m] - row0, :]  for the ids that lie in this shard of rows.
//
// ids (rows), weight (shard_rows, ·) operand, y (rows, ·) float32: overwritten where the id is in
// the shard, left alone elsewhere, so the shards' dispatches complete each other.
// With NOISE each element of a training batch gets noise, uniform in ±noise (NEFTune, Jain et al.,
// 2023), a hash of the micro-batch's key and the element.
// With IMAGE weight is an image, from texel0 on. Launcher: ops/embedding.py.
//#include common/flat.wgsl
//#include common/matrix_in.wgsl OPERAND=weight OPERAND_BINDING=2

struct Params {
    rows: u32,
    stride: u32,
    row0: u32,
    shard_rows: u32,
    texel0: u32,
    scale: f32,
    columns: u32,
    noise: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

//#if NOISE
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/dropout.wgsl

fn noise4(i: u32) -> vec4<f32> {
    if (batch_info[1] == 0u) {
        return vec4<f32>(0.0);
    }
    let at = 4u * i;
    let bits = vec4<u32>(noise_bits(at), noise_bits(at + 1u), noise_bits(at + 2u), noise_bits(at + 3u));
    let uniform_ = vec4<f32>(bits >> vec4<u32>(8u)) * (2.0 / 16777216.0) - 1.0;
    let column = vec4<u32>(4u * (i % params.stride)) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<f32>(0.0), params.noise * uniform_, column < vec4<u32>(params.columns));
}

fn noise_bits(index: u32) -> u32 {
    return mix_bits(mix_bits(index + batch_info[2]) ^ params.module_key);
}
//#endif

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let id = ids[m];
    if (id >= params.row0 && id - params.row0 < params.shard_rows) {
        var v = params.scale * four((id - params.row0) * params.stride + i % params.stride);
//#if NOISE
        v += noise4(i);
//#endif
        y[i] = v;
    }
}
