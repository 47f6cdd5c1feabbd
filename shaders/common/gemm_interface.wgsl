// What all products are given (gemm/*.wgsl), and how they end. Strides of x and w count units of
// eight elements, those of y units of four, r_stride elements.
struct Params {
    rows: u32,
    columns: u32,
    k: u32,
    k_part: u32,
    x_stride: u32,
    x_unit0: u32,
    w_stride: u32,
    y_stride: u32,
    y_unit0: u32,
    row0: u32,
    first_row: u32,
    r: u32,
    r_stride: u32,
    scale: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    expert0: u32,
    experts: u32,
    w_expert: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#output 3 y: 4 sum
//#input 6 bias?: 4 float32
//#input 7 residual?: 4
//#if batch_info
@group(0) @binding(8) var<storage, read> batch_info: array<u32>;
//#endif
//#include common/experts.wgsl
//#if DROPOUT
//#include common/dropout.wgsl
//#endif

// Rows of x that exist.
fn row_count() -> u32 {
//#if ROW_COUNT
    return min(params.rows, max(batch_info[0], params.first_row) - params.first_row);
//#else
    return params.rows;
//#endif
}

// Four neighbouring results of one row, zero past the last column, with the optional bias and
// residual, overwritten or (ACCUMULATE) added to y.
fn store4(row: u32, column: u32, value: vec4<f32>) {
    let unit = params.y_unit0 + column / 4u;
    var v = value;
//#if bias
    v += load_bias(unit);
//#endif
    let columns = vec4<u32>(column) + vec4<u32>(0u, 1u, 2u, 3u);
    v = select(vec4<f32>(0.0), v, columns < vec4<u32>(params.columns));
    let at = row * params.y_stride + unit;
//#if residual
    v += load_residual(at);
//#endif
    store_y(at, v);
}
