// The most multiply-adds an adapter does: 24 independent chains per invocation, so that no
// addition waits for another, in registers only. Launcher: bench/roofline.py.

struct Params {
    turns: u32,
    factor: f32,
    summand: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> sums: array<f32>;

@compute @workgroup_size(32)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let a = params.factor;
    let b = params.summand;
    let start = f32(id.x & 31u);
    //#unroll i 24: var x_$i = start + $i.0;
    for (var turn = 0u; turn < params.turns; turn += 1u) {
        //#unroll r 8, i 24: x_$i = fma(x_$i, a, b);
    }
    var sum = 0.0;
    //#unroll i 24: sum += x_$i;
    sums[id.x] = sum;
}
