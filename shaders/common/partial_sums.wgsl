// Sums over the invocations of a workgroup, always in the same order. The THREADS of them are GROUPS
// of neighbours, and in a group every LANES-th has parts of the same sums. Sixteen parts of each pass
// through workgroup memory at a time: put_four four times, a barrier, add_sixteen, a barrier, and
// total. Whoever stores a part, or reads one, meets no neighbour in a bank of memory.
var<workgroup> partial: array<f32, 16u * THREADS>;
const SIXTEENS = THREADS / (16u * GROUPS * LANES); // of parts of a sum

// Parts of the sums 4·four … 4·four+3.
fn put_four(thread: u32, four: u32, v: vec4<f32>) {
    //#unroll c 4: partial[(4u * four + $cu) * THREADS + thread] = v[$c];
}

// Where sixteen parts of a sum begin, LANES apart.
fn sixteen_at(sum: u32, sixteen: u32) -> u32 {
    return sum * THREADS + sixteen / LANES * (16u * LANES) + sixteen % LANES;
}

// Each invocation adds up sixteen parts of one sum, and leaves what they make in the first's place.
fn add_sixteen(thread: u32) {
    let first = sixteen_at(thread / (THREADS / 16u), thread % (THREADS / 16u));
    let turned = thread / max(LANES, 2u);
    //#unroll i 16: let part_$i = partial[first + LANES * ((turned + $iu) % 16u)];
    let fours = (vec4<f32>(part_0, part_1, part_2, part_3) + vec4<f32>(part_4, part_5, part_6, part_7))
        + (vec4<f32>(part_8, part_9, part_10, part_11) + vec4<f32>(part_12, part_13, part_14, part_15));
    partial[first] = (fours.x + fours.y) + (fours.z + fours.w);
}

// The sum of a lane of a group.
fn total(sum: u32, group: u32, lane: u32) -> f32 {
    var t = 0.0;
    for (var i = 0u; i < SIXTEENS; i += 1u) {
        t += partial[sixteen_at(sum, (group * SIXTEENS + i) * LANES + lane)];
    }
    return t;
}
