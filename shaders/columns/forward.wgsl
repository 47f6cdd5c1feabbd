// y = x[:, first : first + columns]. x, y operands; y overwritten, its padding with zeros.
// One invocation writes two neighbours. Launcher: ops/columns.py.
//#include common/flat.wgsl
//#include common/element_io.wgsl X_BINDING=1 Y_BINDING=2

struct Params {
    rows: u32,
    first: u32,
    columns: u32,
    x_stride: u32,
    y_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;

fn taken(row: u32, column: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    return load_x(row * params.x_stride + params.first + column);
}

fn each(i: u32) {
    let pairs = params.y_stride / 2u;
    let row = i / pairs;
    if (row >= params.rows) {
        return;
    }
    let column = 2u * (i % pairs);
    store_y(i, vec2<f32>(taken(row, column), taken(row, column + 1u)));
}
