// With g = dy · weight, v = x · silu(z) and v̂ = v · rstd over each group of a row's columns (GATE_FIRST):
// dv = rstd · (g - v̂ · mean(g · v̂)),  dx = dv · silu(z),  dz = dv · x · silu'(z);
// else, with g = dy · weight · silu(z) and v = x: dx = dv,  dz = dy · weight · v̂ · silu'(z).
//
// dy, x, z, dx, dz (rows, groups · columns), weight (groups · columns); a group is `units` of eight. Both
// outputs are overwritten. THREADS invocations share a group of a row. Launcher: ops/mamba.py.
//#include common/row_reduce.wgsl
//#include common/activation.wgsl

struct Params {
    rows: u32,
    groups: u32,
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

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one, unstored.
    let wanted = group.x * ROWS + local.y;
    let row = min(wanted, params.rows * params.groups - 1u);
    let thread = local.x;
    let base = row * params.units;
    let weight_at = row % params.groups * params.units;
    var squares = 0.0;
    var products = 0.0;
    for (var i = thread; i < params.units; i += THREADS) {
        let x = load_x(base + i);
        let gate = activate8(load_z(base + i));
        let scaled = multiply8(load_dy(base + i), load_weight(weight_at + i));
        // Either order has the gate once in the products.
        products += dot8(multiply8(scaled, gate), x);
//#if GATE_FIRST
        let v = multiply8(x, gate);
//#else
        let v = x;
//#endif
        squares += dot8(v, v);
    }
    let count = f32(8u * params.units);
    let r = inverseSqrt(reduce_sum(squares, thread) / count + params.eps);
    let mean = r * r * reduce_sum(products, thread) / count;
    if (wanted < params.rows * params.groups) {
        for (var i = thread; i < params.units; i += THREADS) {
            let x = load_x(base + i);
            let z = load_z(base + i);
            let gate = activate8(z);
            let scaled = multiply8(load_dy(base + i), load_weight(weight_at + i));
//#if GATE_FIRST
            let dv = scale8(add_scaled8(scaled, -mean, multiply8(x, gate)), r);
            store_dx(base + i, multiply8(dv, gate));
            store_dz(base + i, multiply8(multiply8(dv, x), activate_gradient8(z)));
//#else
            store_dx(base + i, scale8(add_scaled8(multiply8(scaled, gate), -mean, x), r));
            store_dz(base + i, scale8(multiply8(multiply8(scaled, x), activate_gradient8(z)), r));
//#endif
        }
    }
}
