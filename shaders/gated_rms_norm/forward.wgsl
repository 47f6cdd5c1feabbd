// y = x · rstd · weight · silu(z),  rstd = 1 / √(mean(x²) + eps), over each head.
//
// x, z, y (rows, heads · head_dim), of `heads` heads in all rows, weight (head_dim); head_dim is `units`
// of eight. y is overwritten. One invocation takes a head. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/activation.wgsl

struct Params {
    heads: u32,
    units: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 z: 8
//#input 3 weight: 8 float32
//#output 4 y: 8

fn each(i: u32) {
    if (i >= params.heads) {
        return;
    }
    let base = i * params.units;
    var squares = 0.0;
    for (var d = 0u; d < params.units; d += 1u) {
        let x = load_x(base + d);
        squares += dot8(x, x);
    }
    let r = inverseSqrt(squares / f32(8u * params.units) + params.eps);
    for (var d = 0u; d < params.units; d += 1u) {
        let gate = multiply8(load_weight(d), activate8(load_z(base + d)));
        store_y(base + d, multiply8(scale8(load_x(base + d), r), gate));
    }
}
