// Eight weights of a quantized matrix, decoded and stored. Who includes it declares params and w, and
// says what a code's value is: value_of(code). With GROUP codes and quant_map are those of
// common/block_scale.wgsl. With ALIGNED eight neighbours, a unit, share a row and a block.
//#if !GROUP
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> quant_map: array<f32>;

fn code_word(expert: u32, i: u32) -> u32 {
    return codes[expert * params.codes_expert + i];
}

fn quant_value(code: u32) -> f32 {
    return quant_map[code];
}
//#endif
//#if saturated
// Counts values that are finite and beyond float16's end, where they are held.
@group(0) @binding(7) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif

fn put(unit: u32, v: Eight) {
//#if saturated
    let beyond = beyond8(v);
    if (beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
    store_w(unit, v);
}

//#if ALIGNED
fn four_values(word: u32) -> vec4<f32> {
    return vec4<f32>(value_of(word & 255u), value_of((word >> 8u) & 255u), value_of((word >> 16u) & 255u), value_of(word >> 24u));
}

//#if EIGHT_BITS
alias Codes = vec2<u32>;

fn eight_codes(matrix: u32, unit: u32) -> Codes {
    return vec2<u32>(code_word(matrix, 2u * unit), code_word(matrix, 2u * unit + 1u));
}

fn decoded(words: Codes, scale: f32, minimum: f32) -> Eight {
    let low = four_values(words.x);
    let high = four_values(words.y);
    let even = vec4<f32>(low.xz, high.xz);
    let odd = vec4<f32>(low.yw, high.yw);
    return Eight(weights(even, scale, minimum), weights(odd, scale, minimum));
}
//#else
alias Codes = u32;

fn eight_codes(matrix: u32, unit: u32) -> Codes {
    return code_word(matrix, unit);
}

// The even elements' codes are the high nibbles of the bytes. Each is in a byte of its own before it
// is looked up, since GPUs take bytes out of words with one instruction.
fn decoded(word: Codes, scale: f32, minimum: f32) -> Eight {
    let high = (word >> 4u) & 0x0f0f0f0fu;
    let low = word & 0x0f0f0f0fu;
    return Eight(weights(four_values(high), scale, minimum), weights(four_values(low), scale, minimum));
}
//#endif
//#endif
