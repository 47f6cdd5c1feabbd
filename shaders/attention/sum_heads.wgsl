// dk[row, head] = Σ keys[row, head · group + i], i < group, each sum in its order, and dv so of values.
//
// keys, values (rows, heads · head_dim) float32, dk, dv (rows, heads / group · head_dim); heads are
// UNITS units of four (HEAD_UNIT4) or two elements, strides are counted in them. dk and dv are
// overwritten, with zeros past their last heads. Launcher: kernels/attention/workgroup.py.
//#include common/flat.wgsl
//#include common/head_value.wgsl

struct Params {
    rows: u32, //= dk.rows
    heads: u32,
    group: u32,
    stride: u32,
    sum_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if HEAD_UNIT4
//#input 1 keys: 4 float32
//#input 2 values: 4 float32
//#output 3 dk: 4
//#output 4 dv: 4
//#else
//#input 1 keys: 2 float32
//#input 2 values: 2 float32
//#output 3 dk: 2
//#output 4 dv: 2
//#endif

fn each(i: u32) {
    let row = i / params.sum_stride;
    let unit = i % params.sum_stride;
    let head = unit / UNITS;
    if (row >= params.rows) {
        return;
    }
    var of_keys = HeadValue(0.0);
    var of_values = HeadValue(0.0);
    if (head < params.heads / params.group) {
        let at = row * params.stride + head * params.group * UNITS + unit % UNITS;
        for (var h = 0u; h < params.group; h += 1u) {
            of_keys += load_keys(at + h * UNITS);
            of_values += load_values(at + h * UNITS);
        }
    }
    store_dk(i, of_keys);
    store_dv(i, of_values);
}
