// Eight codes' values, and what a unit of eight adds to a sum: of quantized matrices as products of
// few rows read them. Who includes it says what a code's value is, value_of(code).
//#if EIGHT_BITS
fn eight_values(chunk: vec4<u32>, c: u32) -> Eight {
    let low = chunk[2u * c];
    let high = chunk[2u * c + 1u];
    let even = vec4<f32>(value_of(low & 255u), value_of((low >> 16u) & 255u), value_of(high & 255u), value_of((high >> 16u) & 255u));
    let odd = vec4<f32>(value_of((low >> 8u) & 255u), value_of(low >> 24u), value_of((high >> 8u) & 255u), value_of(high >> 24u));
    return Eight(even, odd);
}
//#else
// The even elements' codes are the high nibbles of the bytes.
fn eight_values(chunk: vec4<u32>, c: u32) -> Eight {
    let word = chunk[c];
    let even = vec4<f32>(value_of((word >> 4u) & 15u), value_of((word >> 12u) & 15u), value_of((word >> 20u) & 15u), value_of(word >> 28u));
    let odd = vec4<f32>(value_of(word & 15u), value_of((word >> 8u) & 15u), value_of((word >> 16u) & 15u), value_of((word >> 24u) & 15u));
    return Eight(even, odd);
}
//#endif

// What a unit's part of a sum is: its codes' values times x, and x alone, where minima ask for it.
fn scaled_sum(of_values: f32, of_x: f32, scale: f32, minimum: f32) -> f32 {
//#if ZEROS
    return scale * (of_values + minimum * of_x);
//#else
//#if MINIMA
    return scale * of_values + minimum * of_x;
//#else
//#if TWO_FACTORS
    return scale * quant_value(VALUES + 256u) * of_values;
//#else
    return scale * of_values;
//#endif
//#endif
//#endif
}
