// du[m, j] = scale · Σ_n dy[m, n] · b[n, j]
//
// dy (rows, N), N padded with zeros to units of eight; b (N, r) float32; du (rows, r) float32,
// overwritten, its padding with zeros. What the kernels of it share. Launcher: kernels/lora.py.
struct Params {
    rows: u32, //= du.rows
    r: u32,
    n: u32,
    dy_stride: u32,
    b_stride: u32,
    du_stride: u32, //= du.elements
    scale: f32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
    layer_r: u32,
    begin1: u32,
    begin2: u32,
    n1: u32,
    n2: u32,
    stride1: u32,
    stride2: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#include common/experts.wgsl
