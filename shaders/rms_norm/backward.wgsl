// dx (+)= rstd · (g - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = x · rstd, over each row.
//
// dy, x, dx (rows, columns), weight (columns), rstd (rows) float32. dx is overwritten or
// (ACCUMULATE) added to; dx_operand, if bound, is what is then in dx. THREADS invocations share a
// row. With parts (of a product, one below the other) dy is their sum. Software adapters read buffers
// word by word: where an invocation has at most TURNS units of a row (HELD), it reads them once, and
// the weight once for EACH rows.
// Launcher: ops/norms.py.
//#include common/row_reduce.wgsl
//#include common/norm_gradient.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
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
//#input 8 dx_before?: 8 float32 texture

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
//#if HELD
    let thread = local.x;
    let last = params.stride - 1u;
    //#unroll t TURNS
        let at_$t = min(thread + $tu * THREADS, last);
        let w_$t = load_weight(at_$t);
    //#end
    let end = min((group.x + 1u) * EACH, params.rows);
    for (var row = group.x * EACH; row < end; row += 1u) {
        let base = row * params.stride;
        let r = rstd[row];
        var sum = 0.0;
        //#unroll t TURNS
            let x_$t = load_x(base + at_$t);
            let g_$t = multiply8(unit_of_dy(base + at_$t), w_$t);
            sum += select(0.0, dot8(g_$t, x_$t), thread + $tu * THREADS <= last);
        //#end
        let mean = r * reduce_sum(sum, thread) / f32(params.columns);
        //#unroll t TURNS
            if (thread + $tu * THREADS <= last) {
                store_both(base + at_$t, scale8(add_scaled8(g_$t, -(r * mean), x_$t), r));
            }
        //#end
    }
}

//#else
    let wanted = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(wanted, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    let r = rstd[row];
    var sum = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        sum += dot8(multiply8(unit_of_dy(base + i), load_weight(i)), load_x(base + i));
    }
    let mean = r * reduce_sum(sum, thread) / f32(params.columns);
    if (wanted < params.rows) {
        for (var i = thread; i < params.stride; i += THREADS) {
            let g = multiply8(unit_of_dy(base + i), load_weight(i));
            store_both(base + i, scale8(add_scaled8(g, -(r * mean), load_x(base + i)), r));
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
