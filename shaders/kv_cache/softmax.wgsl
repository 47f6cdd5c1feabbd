// scores[head, :] = softmax(scores[head, :]), in place.
//
// THREADS invocations share a row. Launcher: ops/cached_attention.py.
//#include common/row_reduce.wgsl

struct Params {
    heads: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let index = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let base = min(index, params.heads - 1u) * params.stride;
    var own = -3.0e38;
    for (var i = local.x; i < params.stride; i += THREADS) {
        own = max(own, scores[base + i]);
    }
    let highest = reduce_max(own, local.x);
    var sum = 0.0;
    for (var i = local.x; i < params.stride; i += THREADS) {
        sum += exp(scores[base + i] - highest);
    }
    let total = reduce_sum(sum, local.x);
    if (index < params.heads) {
        for (var i = local.x; i < params.stride; i += THREADS) {
            scores[base + i] = exp(scores[base + i] - highest) / total;
        }
    }
}
