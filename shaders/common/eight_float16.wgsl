// Eight neighbouring elements as float16, in their order.
fn eight_of_f16(u: vec4<u32>) -> Eight {
    let first = unpack_f16(u.xy);
    let last = unpack_f16(u.zw);
    return eight(first, last);
}

fn f16_of_eight(v: Eight) -> vec4<u32> {
    if (size8(v) > LARGEST_BITS) {
        return held_f16(v);
    }
    return near_f16(v);
}

// The same of values of at most eleven binary digits, such as bfloat16's, which are not rounded.
fn f16_of_digits(v: Eight) -> vec4<u32> {
    if (size8(v) > LARGEST_BITS) {
        return held_f16(v);
    }
    return few_digits(v);
}

// The bits of the largest of eight sizes.
fn size8(v: Eight) -> u32 {
    let size = max(sizes4(v.even), sizes4(v.odd));
    return max(max(size.x, size.y), max(size.z, size.w));
}

// Of values of any size, and of those of which none is beyond the end.
fn held_f16(v: Eight) -> vec4<u32> {
    return half_bits(v.even) | (half_bits(v.odd) << vec4<u32>(16u));
}

fn near_f16(v: Eight) -> vec4<u32> {
    return few_digits(Eight(eleven_digits(v.even), eleven_digits(v.odd)));
}

fn few_digits(v: Eight) -> vec4<u32> {
    return vec4<u32>(
        pack2x16float(vec2<f32>(v.even.x, v.odd.x)), pack2x16float(vec2<f32>(v.even.y, v.odd.y)),
        pack2x16float(vec2<f32>(v.even.z, v.odd.z)), pack2x16float(vec2<f32>(v.even.w, v.odd.w)),
    );
}

// How many of eight values are finite and beyond the end.
fn beyond8(v: Eight) -> u32 {
    return beyond4(v.even) + beyond4(v.odd);
}
//#include common/float16.wgsl
