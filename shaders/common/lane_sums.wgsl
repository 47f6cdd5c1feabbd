// Sums over the LANES invocations of a workgroup, always in the same order.
var<workgroup> partial: array<f32, LANES * SUMS>;

fn put_partial(lane: u32, sum: u32, value: f32) {
    partial[lane * SUMS + sum] = value;
}

fn total(sum: u32) -> f32 {
    var t = 0.0;
    for (var lane = 0u; lane < LANES; lane += 1u) {
        t += partial[lane * SUMS + sum];
    }
    return t;
}
