// y[m, :] += u[m, :]·bᵀ, each sum from the first rank to the last, whatever else is in the batch.
//
// u (rows, r), b (columns, r), y (rows, columns), all float32; padding of y is left as it is.
// Launcher: ops/lora_ends.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    columns: u32, //= y.columns
    stride: u32, //= y.stride
    u_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 u: 4 float32
//#input 2 b: 4 float32
//#output 3 y: 4 sum
//#include common/columns.wgsl

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let unit = i % params.stride;
    // Rows past the last are read as the last, and left out in the end.
    let first = 4u * unit;
    let last = params.columns - 1u;
    let row_0 = min(first, last) * params.u_stride;
    let row_1 = min(first + 1u, last) * params.u_stride;
    let row_2 = min(first + 2u, last) * params.u_stride;
    let row_3 = min(first + 3u, last) * params.u_stride;
    var sum = vec4<f32>(0.0);
    for (var k = 0u; k < params.u_stride; k += 1u) {
        let v = load_u(m * params.u_stride + k);
        sum += vec4<f32>(
            dot(v, load_b(row_0 + k)),
            dot(v, load_b(row_1 + k)),
            dot(v, load_b(row_2 + k)),
            dot(v, load_b(row_3 + k)),
        );
    }
    store_y(i, live4(unit, sum));
}
