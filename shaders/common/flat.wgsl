// The entry of element-wise kernels: each(i) for i = 0, 1, 2, … past the last one they have.
// An invocation takes ELEMENTS of them, FLAT apart, since a workgroup has its price on software
// adapters. Launched with a number of elements instead of workgroups: graph/graph.py.

@compute @workgroup_size(FLAT)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let first = (group.y * groups.x + group.x) * (FLAT * ELEMENTS) + local.x;
    for (var element = 0u; element < ELEMENTS; element += 1u) {
        each(first + element * FLAT);
    }
}
