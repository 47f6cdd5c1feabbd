// y = the mean of every `count` rows of x. y is overwritten. An invocation sums eight neighbouring
// columns. Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    units: u32, //= y.stride
    count: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8

fn each(i: u32) {
    let row = i / params.units;
    if (row < params.rows) {
        var sum = zero8();
        for (var r = 0u; r < params.count; r += 1u) {
            sum = add8(sum, load_x((row * params.count + r) * params.units + i % params.units));
        }
        store_y(i, scale8(sum, 1.0 / f32(params.count)));
    }
}
