// Sums over the THREADS invocations of a workgroup, always in the same order. The parts of one sum
// lie side by side, so that invocations that store a part each meet in no bank of memory; those that
// add up a sum each begin a part further on than their neighbour, so that they do not either.
var<workgroup> partial: array<f32, THREADS * SUMS>;

fn put_partial(thread: u32, sum: u32, value: f32) {
    partial[sum * THREADS + thread] = value;
}

fn total(sum: u32) -> f32 {
    var t = vec4<f32>(0.0);
    let first = sum * THREADS;
    for (var i = sum; i < sum + THREADS; i += 8u) {
        //#unroll j 8: let part_$j = partial[first + (i + $ju) % THREADS];
        t += vec4<f32>(part_0, part_1, part_2, part_3) + vec4<f32>(part_4, part_5, part_6, part_7);
    }
    return (t.x + t.y) + (t.z + t.w);
}
