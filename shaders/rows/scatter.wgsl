// y[rows[first + i], :] = x[i, :]  for the first batch_info[0] - first rows.
//
// x (count, ·), y (·, ·); other rows of y are left alone. Launcher: ops/label_rows.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= x.rows
    first: u32,
    stride: u32, //= x.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 4 buffer
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
//#output 4 y: 4 table

fn each(i: u32) {
    let row = i / params.stride;
    if (row < params.count && params.first + row < batch_info[0]) {
        store_y(rows[params.first + row] * params.stride + i % params.stride, load_x(i));
    }
}
