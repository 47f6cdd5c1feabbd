// y[row, head] = Σ x[row, head · group + i], i < group, each sum in its order.
//
// x (rows, heads · head_dim) float32, y (rows, heads / group · head_dim); heads are UNITS units of
// four (HEAD_UNIT4) or two elements, strides are counted in them. y is overwritten, with zeros past
// its last head. Launcher: kernels/attention/tiles.py.
//#include common/flat.wgsl
//#include common/head_value.wgsl

struct Params {
    rows: u32,
    heads: u32,
    group: u32,
    x_stride: u32,
    y_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if HEAD_UNIT4
//#input 1 x: 4 float32
//#output 2 y: 4
//#else
//#input 1 x: 2 float32
//#output 2 y: 2
//#endif

fn each(i: u32) {
    let row = i / params.y_stride;
    let unit = i % params.y_stride;
    let head = unit / UNITS;
    if (row >= params.rows) {
        return;
    }
    var sum = HeadValue(0.0);
    if (head < params.heads / params.group) {
        let at = row * params.x_stride + head * params.group * UNITS + unit % UNITS;
        for (var h = 0u; h < params.group; h += 1u) {
            sum += load_x(at + h * UNITS);
        }
    }
    store_y(i, sum);
}
