// Every head of y is a part of x0's group of columns for that head, then a part of x1's, if bound,
// and then zeros:
//   y[row, h · head_dim + c] = x0[row, h · group0 + first0 + c]                c < width0
//                            = x1[row, h · group1 + first1 + c - width0]       c < width0 + width1
// With a group of 0 all heads have the same part. y is overwritten, its padding with zeros.
// Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    columns: u32, //= y.columns
    head_dim: u32,
    y_stride: u32, //= y.elements
    x0_stride: u32,
    group0: u32,
    first0: u32,
    width0: u32,
    x1_stride: u32,
    group1: u32,
    first1: u32,
    width1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x0: 1
//#input 2 x1?: 1
//#output 3 y: 8

fn taken(row: u32, column: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    let head = column / params.head_dim;
    let c = column % params.head_dim;
    if (c < params.width0) {
        return load_x0(row * params.x0_stride + head * params.group0 + params.first0 + c);
    }
//#if x1
    if (c - params.width0 < params.width1) {
        let from_x1 = head * params.group1 + params.first1 + c - params.width0;
        return load_x1(row * params.x1_stride + from_x1);
    }
//#endif
    return 0.0;
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
