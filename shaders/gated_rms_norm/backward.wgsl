// dx = rstd · (g - x̂ · mean(g · x̂)),  g = dy · weight · silu(z),  x̂ = x · rstd,  and
// dz = dy · weight · x̂ · silu'(z),  over each head.
//
// dy, x, z, dx, dz (rows, heads · head_dim), of `heads` heads in all rows, weight (head_dim); head_dim is
// `units` of eight. Both outputs are overwritten. One invocation takes a head.
// Launcher: ops/pointwise.py.
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
//#input 4 dy: 8
//#output 5 dx: 8
//#output 6 dz: 8

fn each(i: u32) {
    if (i >= params.heads) {
        return;
    }
    let base = i * params.units;
    var squares = 0.0;
    var products = 0.0;
    for (var d = 0u; d < params.units; d += 1u) {
        let x = load_x(base + d);
        let gate = multiply8(load_weight(d), activate8(load_z(base + d)));
        squares += dot8(x, x);
        products += dot8(multiply8(load_dy(base + d), gate), x);
    }
    let count = f32(8u * params.units);
    let r = inverseSqrt(squares / count + params.eps);
    let mean = r * r * products / count;
    for (var d = 0u; d < params.units; d += 1u) {
        let x = load_x(base + d);
        let z = load_z(base + d);
        let scaled = multiply8(load_dy(base + d), load_weight(d));
        let g = multiply8(scaled, activate8(z));
        store_dx(base + d, scale8(add_scaled8(g, -mean, x), r));
        store_dz(base + d, scale8(multiply8(multiply8(scaled, x), activate_gradient8(z)), r));
    }
}
