// The entry of element-wise kernels: each(i) for i = 0, 1, 2, … past the last one they have.
// An invocation takes TURNS of them, FLAT apart, since a workgroup has its price on software
// adapters. Launched with a number of invocations instead of workgroups: graph/graph.py.

@compute @workgroup_size(FLAT)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let first = (group.y * groups.x + group.x) * (FLAT * TURNS) + local.x;
    for (var turn = 0u; turn < TURNS; turn += 1u) {
        each(first + turn * FLAT);
    }
}
