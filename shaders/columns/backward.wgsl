// dx[:, first : first + columns] = dy, zero elsewhere; or with ACCUMULATE dy is added there.
// Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= dy.rows
    first: u32,
    columns: u32, //= dy.columns
    x_stride: u32, //= dx.elements
    y_stride: u32, //= dy.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 1
//#output 2 dx: 4 sum

fn taken(row: u32, column: u32) -> f32 {
    if (column < params.first || column - params.first >= params.columns) {
        return 0.0;
    }
    return load_dy(row * params.y_stride + column - params.first);
}

fn each(i: u32) {
    let units = params.x_stride / 4u;
    let row = i / units;
    if (row >= params.rows) {
        return;
    }
    let column = 4u * (i % units);
//#if ACCUMULATE
    if (column + 4u <= params.first || column >= params.first + params.columns) {
        return;
    }
//#endif
    store_dx(i, vec4<f32>(taken(row, column), taken(row, column + 1u), taken(row, column + 2u), taken(row, column + 3u)));
}
