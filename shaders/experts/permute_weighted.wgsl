// y[row, :] = weights[assignment] · x[assignment / top_k, :], assignment = assignments[row]; zero
// for rows that nobody has.
//
// x and y (·, columns), y is overwritten; weights (·, top_k) float32. Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    stride: u32, //= x.stride
    top_k: u32,
    weight_stride: u32, //= weights.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
@group(0) @binding(2) var<storage, read> assignments: array<u32>;
@group(0) @binding(3) var<storage, read> weights: array<f32>;
//#output 4 y: 8

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    let assignment = assignments[row];
    if (assignment == 0xffffffffu) {
        store_y(i, zero8());
        return;
    }
    let from_row = assignment / params.top_k;
    let weight = weights[from_row * params.weight_stride + assignment % params.top_k];
    store_y(i, scale8(load_x(from_row * params.stride + i % params.stride), weight));
}
