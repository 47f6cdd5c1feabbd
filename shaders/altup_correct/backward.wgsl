// dmade = Σ_m (1 + gains[j]) · dy_m,  dpredicted = -dmade,  dgains[j] = Σ_columns dy_m · (made -
// predicted),  dadded = Σ_{m: j > 0} dy_m: the gradients of altup_correct/forward.wgsl, of which
// that of base is dy.
//
// Shapes and numbers of streams as there; all outputs are overwritten, dgains with zeros for the
// streams that are not among these, and its padding. THREADS invocations share a row.
// Launcher: ops/altup.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= made.rows
    units: u32, //= made.units
    stride: u32, //= made.stride
    gains_stride: u32, //= gains.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 predicted: 8
//#input 3 made: 8
//#input 4 gains: 1
//#output 5 dpredicted: 8
//#output 6 dmade: 8
//#output 7 dadded?: 8
@group(0) @binding(8) var<storage, read_write> dgains: array<f32>;

fn number(m: u32) -> u32 {
    let j = FIRST + m;
    return j + select(0u, 1u, j >= SKIPPED);
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    let c = row * params.gains_stride;
    //#unroll m COUNT
        let gain_$m = 1.0 + load_gains(c + number($mu));
        var sum_$m = 0.0;
    //#end
    for (var u = thread; u < params.stride; u += THREADS) {
        let innovation = add_scaled8(load_made(base + u), -1.0, load_predicted(base + u));
        var dmade = zero8();
        var dadded = zero8();
        //#unroll m COUNT
            let dy_$m = load_dy($mu * params.units + base + u);
            dmade = add_scaled8(dmade, gain_$m, dy_$m);
            sum_$m += dot8(dy_$m, innovation);
            if (number($mu) > 0u) {
                dadded = add8(dadded, dy_$m);
            }
        //#end
        store_dmade(base + u, dmade);
        store_dpredicted(base + u, scale8(dmade, -1.0));
//#if dadded
        store_dadded(base + u, dadded);
//#endif
    }
    //#unroll m COUNT: let total_$m = reduce_sum(sum_$m, thread);
    if (thread == 0u) {
        for (var j = 0u; j < params.gains_stride; j += 1u) {
            dgains[c + j] = 0.0;
        }
        //#unroll m COUNT: dgains[c + number($mu)] = total_$m;
    }
}
