// What the kernels of products with rows (gemm/nt*.wgsl) are given.
struct Params {
    rows: u32,
    columns: u32,
    k_units: u32,
    x_stride: u32,
    w_stride: u32,
    y_stride: u32,
    y_unit0: u32,
    first_row: u32,
    r_units: u32,
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
@group(0) @binding(1) var<storage, read> x: array<Unit8>;
@group(0) @binding(2) var<storage, read> w: array<Weight8>;
//#if OUT_BF16
@group(0) @binding(3) var<storage, read_write> y: array<vec2<u32>>;
//#else
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;
//#endif
//#if LORA
@group(0) @binding(4) var<storage, read> u: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> b: array<vec4<f32>>;
//#endif
//#if BIAS
@group(0) @binding(6) var<storage, read> bias: array<vec4<f32>>;
//#endif
//#if RESIDUAL
@group(0) @binding(7) var<storage, read> residual: array<vec4<f32>>;
//#endif
//#if NEEDS_BATCH_INFO
@group(0) @binding(8) var<storage, read> batch_info: array<u32>;
//#endif

//#include common/experts.wgsl

// Rows of x that exist.
fn row_count() -> u32 {
//#if ROW_COUNT
    return min(params.rows, max(batch_info[0], params.first_row) - params.first_row);
//#else
    return params.rows;
//#endif
}
