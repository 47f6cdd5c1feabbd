// scores[head, :] = softmax(scores[head, :]), in place.
//
// LANES invocations share a row. Launcher: ops/cached_attention.py.
//#include common/row_reduce.wgsl

struct Params {
    heads: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> scores: array<f32>;

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let wanted = (group.y * groups.x + group.x) * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let base = min(wanted, params.heads - 1u) * params.stride;
    var highest = -3.0e38;
    for (var i = local.x; i < params.stride; i += LANES) {
        highest = max(highest, scores[base + i]);
    }
    let top = reduce_max(highest, local.x);
    var sum = 0.0;
    for (var i = local.x; i < params.stride; i += LANES) {
        sum += exp(scores[base + i] - top);
    }
    let total = reduce_sum(sum, local.x);
    if (wanted < params.heads) {
        for (var i = local.x; i < params.stride; i += LANES) {
            scores[base + i] = exp(scores[base + i] - top) / total;
        }
    }
}
