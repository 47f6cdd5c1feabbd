// The end of both GEMMs: four neighbouring results of one row, zero past the last column, with
// the optional bias and residual, overwritten or (ACCUMULATE) added to y.
//#if OUT_BF16
//#include common/bfloat16.wgsl
//#endif

fn store4(row: u32, column: u32, value: vec4<f32>) {
    let unit = params.y_unit0 + column / 4u;
    var v = value;
//#if BIAS
    v += bias[unit];
//#endif
    let columns = vec4<u32>(column) + vec4<u32>(0u, 1u, 2u, 3u);
    v = select(vec4<f32>(0.0), v, columns < vec4<u32>(params.columns));
    let at = row * params.y_stride + unit;
//#if RESIDUAL
    v += residual[at];
//#endif
//#if OUT_BF16
    y[at] = pack_bf16(v);
//#else
//#if ACCUMULATE
    y[at] += v;
//#else
    y[at] = v;
//#endif
//#endif
}
