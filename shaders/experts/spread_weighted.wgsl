// y[row, :] = weights[choice] · x[choice / top, :], choice = choices[row]; zero for rows that
// nobody has.
//
// x (·, columns) float32, y operand, overwritten; weights (·, top) float32.
// Launcher: ops/routing.py.
//#include common/flat.wgsl
//#include common/operand_out.wgsl OPERAND=y OPERAND_BINDING=4

struct Params {
    rows: u32,
    stride: u32,
    top: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> choices: array<u32>;
@group(0) @binding(3) var<storage, read> weights: array<f32>;

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    let choice = choices[row];
    if (choice == 0xffffffffu) {
        store_y(i, vec4<f32>(0.0), vec4<f32>(0.0));
        return;
    }
    let from_row = choice / params.top;
    let weight = weights[from_row * params.weight_stride + choice % params.top];
    let at = 2u * (from_row * params.stride + i % params.stride);
    store_y(i, weight * x[at], weight * x[at + 1u]);
}
