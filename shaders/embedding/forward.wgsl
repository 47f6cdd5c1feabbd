// y[m, :] = scale · weight[ids[m] - row0, :]  for the ids that lie in this shard of rows.
//
// ids (rows), weight (shard_rows, ·), y (rows, ·): overwritten where the id is in the shard, left
// alone elsewhere, so the shards' dispatches complete each other.
// With batch_info each element of a training batch gets noise, uniform in ±noise (NEFTune, Jain et
// al., 2023), a hash of the micro-batch's key and the element. Launcher: ops/lora_ends.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= y.stride
    row0: u32,
    shard_rows: u32,
    scale: f32,
    columns: u32, //= y.columns
    noise: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
//#input 2 weight: 4 table
//#output 3 y: 4

//#if batch_info
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/columns.wgsl
//#include common/dropout.wgsl

fn noise4(i: u32) -> vec4<f32> {
    if (batch_info[1] == 0u) {
        return vec4<f32>(0.0);
    }
    let at = 4u * i;
    let bits = vec4<u32>(random_bits(at), random_bits(at + 1u), random_bits(at + 2u), random_bits(at + 3u));
    let uniform_ = vec4<f32>(bits >> vec4<u32>(8u)) * (2.0 / 16777216.0) - 1.0;
    return live4(i % params.stride, params.noise * uniform_);
}
//#endif

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let id = ids[m];
    if (id >= params.row0 && id - params.row0 < params.shard_rows) {
        var v = params.scale * load_weight((id - params.row0) * params.stride + i % params.stride);
//#if batch_info
        v += noise4(i);
//#endif
        store_y(i, v);
    }
}
