// What products of few rows with a frozen matrix are given (few_rows/*.wgsl), and how they end:
//
// y[m, c] = scale · Σ_k x[m, k] · w[c, k]  + Σ_j u[m, j] · b[c, j]  + bias[c] + residual[m, c]
//
// x (rows, 8 · units), u (rows, r) float32, b (columns, r) float32, r padded with zeros to units of
// four; results as in common/gemm_results.wgsl. Where tile_experts is bound each row meets the matrix
// of its expert. An invocation has four neighbouring columns, all of one layer. A row's sums are made
// in one order whatever rows are beside it: a text's tokens do not depend on its neighbours. What KEEPS
// keys and values knows how many tokens of a text there is room for, its capacity.
// Launcher: kernels/gemm/few_rows.py.
struct Params {
    rows: u32, //= x.rows
    columns: u32,
    units: u32, //= x.stride
    x_stride: u32,
    w_stride: u32,
    w_expert: u32,
    scale_stride: u32,
    y_stride: u32,
    y_unit0: u32,
    scale: f32,
    r: u32,
    r_stride: u32, //= u.elements
    b_stride: u32,
    begin1: u32,
    begin2: u32,
    stride1: u32,
    stride2: u32,
    bias1: u32,
    bias2: u32,
    bias_expert: u32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
    codes0: u32,
    codes1: u32,
    codes2: u32,
    absmax0: u32,
    absmax1: u32,
    absmax2: u32,
    nested0: u32,
    nested1: u32,
    nested2: u32,
    maps0: u32,
    maps1: u32,
    maps2: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
//#if KEEPS
    capacity: u32,
//#endif
}

@group(0) @binding(0) var<uniform> params: Params;
//#if X_IN_TEXTURE
//#input 1 x: 8 texture
//#else
//#input 1 x: 8
//#endif
//#input 10 u?: 4 float32
//#input 5 b?: 4 float32
//#include common/gemm_results.wgsl
//#include common/experts.wgsl
//#if DENSE
//#input 2 w: 8
//#else
//#if STRIPS
//#include common/strip_codes.wgsl
//#else
//#include common/block_scale.wgsl
//#include common/few_rows_codes.wgsl
//#endif
//#endif

// Four terms of the LoRA sums of four columns of a layer, from the k-th unit of u and b on.
fn term4(row: u32, layer: u32, column: u32, expert: u32, k: u32) -> vec4<f32> {
    let own = load_u(row * (params.r_stride / 4u) + layer * (params.r / 4u) + k);
    let stride = params.b_stride / 4u;
    let at = adapter_at(expert) + 4u * params.y_unit0 * stride + k;
    //#unroll j 4: let b_$j = load_b(at + min(column + $ju, params.columns - 1u) * stride);
    return vec4<f32>(dot(own, b_0), dot(own, b_1), dot(own, b_2), dot(own, b_3));
}

// Columns that are written, those of the padding with zeros.
fn padded_columns() -> u32 {
    return (params.columns + 7u) / 8u * 8u;
}

// Terms of the sum beside the product, in units of four.
fn term_units() -> u32 {
//#if u
    return (params.r + 3u) / 4u;
//#else
    return 0u;
//#endif
}

//#include common/tree8.wgsl

fn sum8(a: Eight) -> f32 {
    let fours = a.even + a.odd;
    return (fours.x + fours.y) + (fours.z + fours.w);
}
