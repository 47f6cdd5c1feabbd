// y = x · silu(z) · rstd · weight (GATE_FIRST), rstd = 1 / √(mean((x · silu(z))²) + eps) over each group of a
// row's columns; else y = x · rstd · weight · silu(z), rstd = 1 / √(mean(x²) + eps).
//
// x, z, y (rows, groups · columns), weight (groups · columns); a group is `units` of eight. y is overwritten.
// THREADS invocations share a group of a row. Launcher: ops/mamba.py.
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
//#output 4 y: 8

fn normed(at: u32) -> Eight {
//#if GATE_FIRST
    return multiply8(load_x(at), activate8(load_z(at)));
//#else
    return load_x(at);
//#endif
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min(group.x * ROWS + local.y, params.rows * params.groups - 1u);
    let thread = local.x;
    let base = row * params.units;
    let weight_at = row % params.groups * params.units;
    var total = 0.0;
    for (var i = thread; i < params.units; i += THREADS) {
        let v = normed(base + i);
        total += dot8(v, v);
    }
    let r = inverseSqrt(reduce_sum(total, thread) / f32(8u * params.units) + params.eps);
    for (var i = thread; i < params.units; i += THREADS) {
        var v = multiply8(scale8(normed(base + i), r), load_weight(weight_at + i));
//#if !GATE_FIRST
        v = multiply8(v, activate8(load_z(base + i)));
//#endif
        store_y(base + i, v);
    }
}
