// What attention's backward kernels share that work on matrix units.
//
// In f16, what is large and what is small must be put between its ends: gradients of o are
// multiplied by a power of two (x_scale) that puts the largest just below 2¹⁵, and weights' gradients
// by another (ds_scale), for which ds < 2 · HEAD · 2¹⁵ · the largest value is a bound.
// lse_delta ends with the largest of both, per block of SIZED rows and head of q
// (attention/delta_sizes.wgsl).
//#include common/attention_tile_gradient.wgsl
//#include common/attention_masks.wgsl

var<private> x_scale: f32 = 1.0;
var<private> x_inverse: f32 = 1.0;
var<private> ds_scale: f32 = 1.0;
var<private> ds_inverse: f32 = 1.0;
//#if HALF

// Of dout and v, in rows first to last of a sequence and heads from head on.
fn largest_of(sequence: u32, head: u32, heads: u32, first: u32, last: u32, index: u32, step: u32) -> vec2<f32> {
    let blocks = (params.seq + SIZED - 1u) / SIZED;
    let begin = params.rows * params.heads + (sequence * params.heads + head) * blocks + first / SIZED;
    let count = last / SIZED - first / SIZED + 1u;
    var largest = vec2<f32>(0.0);
    for (var i = index; i < count * heads; i += step) {
        largest = max(largest, lse_delta[begin + i / count * blocks + i % count]);
    }
    return largest;
}

// The same, looked for by the whole workgroup.
fn largest_of_walk(sequence: u32, head: u32, heads: u32, first: u32, last: u32, index: u32) -> vec2<f32> {
    memory[index] = bitcast<vec4<u32>>(vec4<f32>(largest_of(sequence, head, heads, first, last, index, THREADS), 0.0, 0.0));
    workgroupBarrier();
    for (var count = THREADS / 2u; count > 0u; count /= 2u) {
        if (index < count) {
            memory[index] = bitcast<vec4<u32>>(max(floats(index), floats(index + count)));
        }
        workgroupBarrier();
    }
    let largest = floats(0u).xy;
    workgroupBarrier();
    return largest;
}

// Exponents are as float32 has them, 127 more; factors and their inverses stay normal.
fn take_scales(dout: f32, value: f32) {
    let x_exponent = u32(clamp(127 + 14 + 127 - i32(bitcast<u32>(dout) >> 23u), 1, 253));
    x_scale = bitcast<f32>(x_exponent << 23u);
    x_inverse = bitcast<f32>((254u - x_exponent) << 23u);
    // Values are held at 65,504 < 2¹⁶. 2^HEAD_BITS >= HEAD.
    let value_exponent = min(i32(bitcast<u32>(value) >> 23u) + 1, 127 + 16);
    let ds_exponent = u32(clamp(127 + 15 - 1 - i32(HEAD_BITS) - 15 - (value_exponent - 127), 1, 253));
    ds_scale = bitcast<f32>(ds_exponent << 23u);
    ds_inverse = bitcast<f32>((254u - ds_exponent) << 23u);
}
//#endif
