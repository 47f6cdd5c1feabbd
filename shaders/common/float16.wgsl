// float16, two to a u32, the first in the low half, rounded to nearest. What is finite and beyond
// its end is held there; NaN stays NaN, and infinity infinity. A driver's conversion need not see to
// either, and AMD's rounds towards zero.
const LARGEST = 65504.0;
const LARGEST_BITS = 0x477fe000u;
const INFINITE_BITS = 0x7f800000u;

fn sizes4(v: vec4<f32>) -> vec4<u32> {
    return bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
}

fn pack_f16(v: vec4<f32>) -> vec2<u32> {
    let size = sizes4(v);
    if (max(max(size.x, size.y), max(size.z, size.w)) > LARGEST_BITS) {
        let bits = half_bits(v);
        return bits.xz | (bits.yw << vec2<u32>(16u));
    }
    let near = eleven_digits(v);
    return vec2<u32>(pack2x16float(near.xy), pack2x16float(near.zw));
}

// The nearest numbers of so many binary digits, for finite ones.
fn eleven_digits(v: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>((bitcast<vec4<u32>>(v) + vec4<u32>(0x1000u)) & vec4<u32>(0xffffe000u));
}

fn unpack_f16(u: vec2<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(u.x), unpack2x16float(u.y));
}

// Each value's 16 bits, for values of any size.
fn half_bits(v: vec4<f32>) -> vec4<u32> {
    let size = sizes4(v);
    let held = eleven_digits(clamp(v, vec4<f32>(-LARGEST), vec4<f32>(LARGEST)));
    let pairs = vec2<u32>(pack2x16float(held.xy), pack2x16float(held.zw));
    let finite = vec4<u32>(pairs.x & 0xffffu, pairs.x >> 16u, pairs.y & 0xffffu, pairs.y >> 16u);
    let sign = (bitcast<vec4<u32>>(v) >> vec4<u32>(16u)) & vec4<u32>(0x8000u);
    let other = select(vec4<u32>(0x7c00u), vec4<u32>(0x7e00u), size > vec4<u32>(INFINITE_BITS));
    return select(sign | other, finite, size < vec4<u32>(INFINITE_BITS));
}

// How many of four values are finite and beyond the end.
fn beyond4(v: vec4<f32>) -> u32 {
    let size = sizes4(v);
    let beyond = (size > vec4<u32>(LARGEST_BITS)) & (size < vec4<u32>(INFINITE_BITS));
    let ones = select(vec4<u32>(0u), vec4<u32>(1u), beyond);
    return ones.x + ones.y + ones.z + ones.w;
}
