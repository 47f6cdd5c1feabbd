// Sums over the THREADS invocations of a workgroup, always in the same order.
var<workgroup> partial: array<f32, THREADS * SUMS>;

fn put_partial(thread: u32, sum: u32, value: f32) {
    partial[thread * SUMS + sum] = value;
}

fn total(sum: u32) -> f32 {
    var t = 0.0;
    for (var thread = 0u; thread < THREADS; thread += 1u) {
        t += partial[thread * SUMS + sum];
    }
    return t;
}
