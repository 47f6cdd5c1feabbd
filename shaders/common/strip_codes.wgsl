// Codes and scales of a quantized matrix in strips (kernels/gemm/packed.py): w has a texel of codes for CHUNK
// units of eight of a column, scales a texel for a block of four columns, and with MINIMA minima one.
// A code's value is a constant, V0 and on; with AFFINE that is the first value plus the code.
//#input 2 w: words
//#input 9 scales: words
//#if MINIMA
//#input 11 minima: words
//#endif

//#if AFFINE
fn value_of(code: u32) -> f32 {
    return f32(i32(code)) + V0;
}
//#else
fn value_of(code: u32) -> f32 {
    let b0 = (code & 1u) != 0u;
    let b1 = (code & 2u) != 0u;
    let b2 = (code & 4u) != 0u;
    let q_0 = select(select(V0, V1, b0), select(V2, V3, b0), b1);
    let q_1 = select(select(V4, V5, b0), select(V6, V7, b0), b1);
    let q_2 = select(select(V8, V9, b0), select(V10, V11, b0), b1);
    let q_3 = select(select(V12, V13, b0), select(V14, V15, b0), b1);
    return select(select(q_0, q_1, b2), select(q_2, q_3, b2), (code & 8u) != 0u);
}
//#endif
//#include common/code_units.wgsl
