// y = x[:, first : first + columns]. y is overwritten, its padding with zeros.
// An invocation writes eight neighbours, which may lie anywhere in x. Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    first: u32,
    columns: u32, //= y.columns
    x_stride: u32,
    y_stride: u32, //= y.elements
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 1
//#output 2 y: 8

fn taken(row: u32, column: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    return load_x(row * params.x_stride + params.first + column);
}

fn each(i: u32) {
    let units = params.y_stride / 8u;
    let row = i / units;
    if (row < params.rows) {
        let c = 8u * (i % units);
        store_y(i, Eight(
            vec4<f32>(taken(row, c), taken(row, c + 2u), taken(row, c + 4u), taken(row, c + 6u)),
            vec4<f32>(taken(row, c + 1u), taken(row, c + 3u), taken(row, c + 5u), taken(row, c + 7u)),
        ));
    }
}
