// counts[e · THREADS + thread] = how many of the thread's share of ids, a run of them, are e.
//
// A workgroup per expert. Launcher: ops/routing.py.

struct Params {
    count: u32,
    share: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read_write> counts: array<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let expert = group.x;
    let first = local.x * params.share;
    var count = 0u;
    for (var i = first; i < min(first + params.share, params.count); i += 1u) {
        count += select(0u, 1u, ids[i] == expert);
    }
    counts[expert * THREADS + local.x] = count;
}
