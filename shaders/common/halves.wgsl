// Values in 16 bits, as matrix units read them. f16 ends at 65,504: what is beyond is held there;
// NaN stays NaN, and infinity infinity.
const LARGEST = 65504.0;
const LARGEST_BITS = 0x477fe000u;
const INFINITE_BITS = 0x7f800000u;

fn sizes4(v: vec4<f32>) -> vec4<u32> {
    return bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
}

// The bits of the largest of eight sizes.
fn size8(v: Eight) -> u32 {
    let size = max(sizes4(v.even), sizes4(v.odd));
    return max(max(size.x, size.y), max(size.z, size.w));
}

// Eight values in their order, each in 16 bits.
fn halves8(v: Eight) -> vec4<u32> {
    if (size8(v) > LARGEST_BITS) {
        return held_halves8(v);
    }
    return small_halves8(v);
}

fn held_halves8(v: Eight) -> vec4<u32> {
    return half_bits(v.even) | (half_bits(v.odd) << vec4<u32>(16u));
}

// Where none is beyond f16.
fn small_halves8(v: Eight) -> vec4<u32> {
    return vec4<u32>(
        pack2x16float(vec2<f32>(v.even.x, v.odd.x)), pack2x16float(vec2<f32>(v.even.y, v.odd.y)),
        pack2x16float(vec2<f32>(v.even.z, v.odd.z)), pack2x16float(vec2<f32>(v.even.w, v.odd.w)),
    );
}

// Each value's 16 bits, for values of any size: a conversion need not make infinities and NaN.
fn half_bits(v: vec4<f32>) -> vec4<u32> {
    let size = sizes4(v);
    let held = clamp(v, vec4<f32>(-LARGEST), vec4<f32>(LARGEST));
    let pairs = vec2<u32>(pack2x16float(held.xy), pack2x16float(held.zw));
    let finite = vec4<u32>(pairs.x & 0xffffu, pairs.x >> 16u, pairs.y & 0xffffu, pairs.y >> 16u);
    let sign = (bitcast<vec4<u32>>(v) >> vec4<u32>(16u)) & vec4<u32>(0x8000u);
    let other = select(vec4<u32>(0x7c00u), vec4<u32>(0x7e00u), size > vec4<u32>(INFINITE_BITS));
    return select(sign | other, finite, size < vec4<u32>(INFINITE_BITS));
}

// How many of eight values are finite and beyond f16.
fn count_beyond(v: Eight) -> u32 {
    return beyond4(v.even) + beyond4(v.odd);
}

fn beyond4(v: vec4<f32>) -> u32 {
    let size = sizes4(v);
    let beyond = (size > vec4<u32>(LARGEST_BITS)) & (size < vec4<u32>(INFINITE_BITS));
    let ones = select(vec4<u32>(0u), vec4<u32>(1u), beyond);
    return ones.x + ones.y + ones.z + ones.w;
}
