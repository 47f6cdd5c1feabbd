// dx (+)= rstd · (g - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = x · rstd, over each row.
//
// dy, x, dx (rows, columns), weight (columns), rstd (rows) float32. dx is overwritten or
// (ACCUMULATE) added to; dx_operand, if bound, is what is then in dx. THREADS invocations share a
// row. With parts (of a product, one below the other) dy is their sum. Rows of at most TURNS units
// an invocation are read once (HELD), since software adapters read buffers word by word.
// Launcher: ops/rms_norm.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
    parts: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy?: 8
//#input 2 x: 8
//#input 3 weight: 8 float32
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
//#output 5 dx: 8 sum
//#output 6 dx_operand?: 8
//#input 7 parts?: 8 float32

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let wanted = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(wanted, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    let r = rstd[row];
//#if HELD
    let last = params.stride - 1u;
    //#unroll t TURNS
        let at_$t = min(thread + $tu * THREADS, last);
        let x_$t = load_x(base + at_$t);
        let g_$t = multiply8(unit_of_dy(base + at_$t), load_weight(at_$t));
    //#end
    var sum = 0.0;
    //#unroll t TURNS: sum += select(0.0, dot8(g_$t, x_$t), thread + $tu * THREADS <= last);
    let mean = r * reduce_sum(sum, thread) / f32(params.columns);
    //#unroll t TURNS
        if (wanted < params.rows && thread + $tu * THREADS <= last) {
            store_dx(base + at_$t, scale8(add_scaled8(g_$t, -(r * mean), x_$t), r));
//#if dx_operand
            store_dx_operand(base + at_$t, eight(dx[base + at_$t].lo, dx[base + at_$t].hi));
//#endif
        }
    //#end
}
//#else
    var sum = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        sum += dot8(multiply8(unit_of_dy(base + i), load_weight(i)), load_x(base + i));
    }
    let mean = r * reduce_sum(sum, thread) / f32(params.columns);
    if (wanted < params.rows) {
        for (var i = thread; i < params.stride; i += THREADS) {
            let g = multiply8(unit_of_dy(base + i), load_weight(i));
            store_dx(base + i, scale8(add_scaled8(g, -(r * mean), load_x(base + i)), r));
//#if dx_operand
            store_dx_operand(base + i, eight(dx[base + i].lo, dx[base + i].hi));
//#endif
        }
    }
}
//#endif

//#if parts
fn unit_of_dy(at: u32) -> Eight {
    var v = zero8();
    for (var part = 0u; part < params.parts; part += 1u) {
        v = add8(v, load_parts(part * params.rows * params.stride + at));
    }
    return v;
}
//#else
fn unit_of_dy(at: u32) -> Eight {
    return load_dy(at);
}
//#endif
