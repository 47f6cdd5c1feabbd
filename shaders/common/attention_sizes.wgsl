// How large gradients of o and values are, as attention/delta_sizes.wgsl tells: lse_delta ends with
// the largest of both, per block of SIZED rows and head of q.

struct Sizes {
    x: f32, // of dout
    y: f32, // of v
    is_spoilt: bool, // whether a log-sum-exp or a delta is not finite
}

// In rows first to last of a sequence and heads from head on.
fn largest_of(sequence: u32, head: u32, heads: u32, first: u32, last: u32, index: u32, step: u32) -> Sizes {
    let blocks = (params.seq + SIZED - 1u) / SIZED;
    let begin = params.rows * params.heads + (sequence * params.heads + head) * blocks + first / SIZED;
    let count = last / SIZED - first / SIZED + 1u;
    var largest = Sizes(0.0, 0.0, false);
    for (var i = index; i < count * heads; i += step) {
        let found = lse_delta[begin + i / count * blocks + i % count];
        largest = larger(largest, Sizes(abs(found.x), found.y, bitcast<u32>(found.x) >> 31u == 1u));
    }
    return largest;
}

fn larger(a: Sizes, b: Sizes) -> Sizes {
    return Sizes(max(a.x, b.x), max(a.y, b.y), a.is_spoilt || b.is_spoilt);
}

// The same, looked for by the whole workgroup, through its memory.
fn largest_of_walk(sequence: u32, head: u32, heads: u32, first: u32, last: u32, index: u32) -> Sizes {
    put_sizes(index, largest_of(sequence, head, heads, first, last, index, THREADS));
    workgroupBarrier();
    for (var count = THREADS / 2u; count > 0u; count /= 2u) {
        if (index < count) {
            put_sizes(index, larger(sizes_at(index), sizes_at(index + count)));
        }
        workgroupBarrier();
    }
    let largest = sizes_at(0u);
    workgroupBarrier();
    return largest;
}

fn put_sizes(at: u32, sizes: Sizes) {
    memory[at] = vec4<u32>(bitcast<u32>(sizes.x), bitcast<u32>(sizes.y), select(0u, 1u, sizes.is_spoilt), 0u);
}

fn sizes_at(at: u32) -> Sizes {
    let found = memory[at];
    return Sizes(bitcast<f32>(found.x), bitcast<f32>(found.y), found.z == 1u);
}

// Of the power of two that puts this just below 2¹⁵, as float32 has exponents; normal, as its inverse.
fn exponent_of_scale(size: f32) -> u32 {
    return u32(clamp(127 + 14 + 127 - i32(bitcast<u32>(size) >> 23u), 1, 253));
}

fn power(exponent: u32) -> f32 {
    return bitcast<f32>(exponent << 23u);
}
