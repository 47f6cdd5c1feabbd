// y[c, i] = factors[first + i] · x[i, column0 + c]  for the first batch_info[0] - first rows i of x, zero for the
// others, whatever is in them; without factors they are one.
//
// x (count, ·), y (columns, count) of any type, overwritten; factors float32, of each label row.
// Neighbouring invocations read neighbours of a row. Launcher: ops/label_rows.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= x.rows
    first: u32,
    columns: u32, //= y.rows
    x_stride: u32,
    y_stride: u32,
    column0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 1 table
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
//#if factors
@group(0) @binding(3) var<storage, read> factors: array<f32>;
//#endif
//#output 4 y: 8

fn value(i: u32, column: u32) -> f32 {
    let label = params.first + i;
    if (i >= params.count || label >= batch_info[0]) {
        return 0.0;
    }
//#if factors
    return factors[label] * load_x(i * params.x_stride + column);
//#else
    return load_x(i * params.x_stride + column);
//#endif
}

fn four(i: u32, column: u32) -> vec4<f32> {
    return vec4<f32>(value(i, column), value(i + 1u, column), value(i + 2u, column), value(i + 3u, column));
}

fn each(i: u32) {
    let row = i % params.columns;
    let column = params.column0 + row;
    let unit = i / params.columns;
    if (unit >= params.y_stride) {
        return;
    }
    store_y(row * params.y_stride + unit, eight(four(8u * unit, column), four(8u * unit + 4u, column)));
}
