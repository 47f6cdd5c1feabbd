// u[m, j] = scale · Σ_k mask[m, k] · x[m, k] · a[j, k]
//
// x (rows, K), a (r, K) float32, K padded with zeros to units of eight; u (rows, r) float32,
// overwritten, its padding with zeros. What the kernels of it share. Launcher: kernels/lora.py.
struct Params {
    rows: u32, //= u.rows
    r: u32,
    x_stride: u32,
    a_stride: u32,
    u_stride: u32, //= u.elements
    scale: f32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if DROPOUT
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/dropout.wgsl
//#endif
//#include common/experts.wgsl
