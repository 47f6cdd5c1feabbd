// What the forward keeps of four elements of an adapter's x, which begin at 4 · unit.
fn masked4(v: vec4<f32>, unit: u32) -> vec4<f32> {
//#if DROPOUT
    return v * dropout_mask4(4u * unit);
//#else
    return v;
//#endif
}
