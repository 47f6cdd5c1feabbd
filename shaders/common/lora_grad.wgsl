// The gradient of A or B: a sum over the batch's rows of outer products.
//
// g[c, j] += Σ_m x[m, c] · u[m, j]      dB = dyᵀ·u:  x = dy,  g (columns, r)
// g[j, c] += Σ_m x[m, c] · u[m, j]      dA = duᵀ·x:  TRANSPOSED, x masked as its forward was
//                                       (DROPOUT),  g (r, columns)
// x (rows, columns), u (rows, r) float32; g float32 is added to, once, so that the sum of a
// micro-batch does not depend on what was there, at binding 3. What the kernels of it share.
// Launcher: kernels/lora.py.
struct Params {
    rows: u32, //= x.rows
    x_columns: u32,
    x_stride: u32,
    r: u32,
    r_stride: u32,
    g_stride: u32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    lora_expert: u32,
    begin1: u32,
    begin2: u32,
    stride1: u32,
    stride2: u32,
    groups_b: u32,
    down_b: u32,
    down_a: u32,
    xa_columns: u32,
    xa_stride: u32,
    ra: u32,
    ga_stride: u32,
    lora_expert_a: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 2 u: 4 float32
//#if DROPOUT
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/dropout.wgsl
//#endif
//#include common/expert_rows.wgsl
