// dx[:, first : first + columns] += dy. dy bfloat16 (BF16) or float32, dx float32.
// Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32,
    first: u32,
    columns: u32,
    x_stride: u32,
    y_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read_write> dx: array<f32>;
//#if BF16
@group(0) @binding(1) var<storage, read> dy: array<u32>;

fn load_dy(element: u32) -> f32 {
    let word = dy[element / 2u];
    return bitcast<f32>(select(word & 0xffff0000u, word << 16u, element % 2u == 0u));
}
//#else
@group(0) @binding(1) var<storage, read> dy: array<f32>;

fn load_dy(element: u32) -> f32 {
    return dy[element];
}
//#endif

fn each(i: u32) {
    let row = i / params.columns;
    if (row < params.rows) {
        let column = i % params.columns;
        dx[row * params.x_stride + params.first + column] += load_dy(row * params.y_stride + column);
    }
}
