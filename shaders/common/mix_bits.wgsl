// A hash of 32 bits: each bit of the result depends on all of the argument.
fn mix_bits(v: u32) -> u32 {
    var x = v;
    x = (x ^ (x >> 16u)) * 0x7feb352du;
    x = (x ^ (x >> 15u)) * 0x846ca68bu;
    return x ^ (x >> 16u);
}
