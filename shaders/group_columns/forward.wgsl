// x's columns are groups of `group` each, of which `widths` from `first` on are taken: all groups'
// first part, then their second, their third. y is overwritten, its padding with zeros.
// Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= y.columns
    groups: u32,
    group: u32,
    first: u32,
    width0: u32,
    width1: u32,
    width2: u32,
    x_stride: u32,
    y_stride: u32, //= y.elements
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 1
//#output 2 y: 8

// The column of x that a column of y is.
fn source(column: u32) -> u32 {
    var c = column;
    var start = params.first;
    var width = params.width0;
    if (c >= params.groups * width) {
        c -= params.groups * width;
        start += width;
        width = params.width1;
        if (c >= params.groups * width) {
            c -= params.groups * width;
            start += width;
            width = params.width2;
        }
    }
    return c / width * params.group + start + c % width;
}

fn taken(row: u32, column: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    return load_x(row * params.x_stride + source(column));
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
