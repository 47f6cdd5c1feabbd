// The gradient of one of forward.wgsl's sources from that of y, whose heads have its part from
// column `at` on: dx has dy's columns there, their sum over all heads where these have the same part
// (SHARED), and zero elsewhere; or with ACCUMULATE they are added. Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= dy.rows
    heads: u32,
    head_dim: u32,
    y_stride: u32, //= dy.stride
    x_stride: u32, //= dx.elements
    group: u32,
    first: u32,
    width: u32,
    at: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 1
//#output 2 dx: 4 sum

fn taken(row: u32, column: u32) -> f32 {
    let base = row * params.y_stride + params.at;
//#if SHARED
    if (column < params.first || column - params.first >= params.width) {
        return 0.0;
    }
    var sum = 0.0;
    for (var head = 0u; head < params.heads; head += 1u) {
        sum += load_dy(base + head * params.head_dim + column - params.first);
    }
    return sum;
//#else
    let head = column / params.group;
    let c = column % params.group;
    if (head >= params.heads || c < params.first || c - params.first >= params.width) {
        return 0.0;
    }
    return load_dy(base + head * params.head_dim + c - params.first);
//#endif
}

fn each(i: u32) {
    let units = params.x_stride / 4u;
    let row = i / units;
    if (row < params.rows) {
        let c = 4u * (i % units);
        store_dx(i, vec4<f32>(taken(row, c), taken(row, c + 1u), taken(row, c + 2u), taken(row, c + 3u)));
    }
}
