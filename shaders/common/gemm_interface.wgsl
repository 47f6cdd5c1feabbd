// What all products are given (gemm/*.wgsl), and how they end. Strides of x and w count units of
// eight elements, those of y units of four, r_stride elements.
struct Params {
    rows: u32, //= x.rows
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
    r_stride: u32, //= u.elements
    b_stride: u32,
    scale: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    expert0: u32,
    experts: u32,
    w_expert: u32,
    lora_expert: u32,
    begin1: u32,
    begin2: u32,
    stride1: u32,
    stride2: u32,
    bias1: u32,
    bias2: u32,
    bias_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#include common/gemm_results.wgsl
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
