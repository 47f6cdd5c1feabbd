// Where texel i of an operand lies: 1024 to a row.
fn texel_at(i: u32) -> vec2<u32> {
    return vec2<u32>(i & 1023u, i >> 10u);
}
