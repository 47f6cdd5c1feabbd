// Sums over the LANES invocations that share a chunk's four tokens; which have them afterwards: all.
var<workgroup> shared_sums: array<vec4<f32>, THREADS>;

fn sum_over_lanes(index: u32, value: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    shared_sums[index] = value;
    workgroupBarrier();
    var sum = vec4<f32>(0.0);
    for (var lane = 0u; lane < LANES; lane += 1u) {
        sum += shared_sums[index / LANES * LANES + lane];
    }
    return sum;
}
