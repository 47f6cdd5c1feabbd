// scores[head, :] = softmax(scores[head, :]), in place; with sinks (heads), the sum has exp(sink)
// beside the scores' terms.
//
// THREADS invocations share a row. Launcher: ops/cached_attention.py.
//#include common/row_reduce.wgsl

struct Params {
    heads: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;
//#if sinks
@group(0) @binding(2) var<storage, read> sinks: array<f32>;
//#endif

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let index = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let head = min(index, params.heads - 1u);
    let base = head * params.stride;
//#if sinks
    var own = sinks[head];
//#else
    var own = -3.0e38;
//#endif
    for (var i = local.x; i < params.stride; i += THREADS) {
        own = max(own, scores[base + i]);
    }
    let highest = reduce_max(own, local.x);
    var sum = 0.0;
    for (var i = local.x; i < params.stride; i += THREADS) {
        sum += exp(scores[base + i] - highest);
    }
//#if sinks
    if (local.x == 0u) {
        sum += exp(sinks[head] - highest);
    }
//#endif
    let total = reduce_sum(sum, local.x);
    if (index < params.heads) {
        for (var i = local.x; i < params.stride; i += THREADS) {
            scores[base + i] = exp(scores[base + i] - highest) / total;
        }
    }
}
