// y = x · rstd · weight (+ residual),  rstd = 1 / √(mean(x²) + eps), over each row.
//
// x, residual, y (rows, columns), weight (columns), rstd (rows) float32; both outputs overwritten.
// Padding columns of x are zero and stay so. THREADS invocations share a row.
// With parts (of a product, one below the other) x is their sum, to which `added` is, and is
// written to `sum`, float32. Software adapters read buffers word by word: where an invocation has at
// most TURNS units of a row (HELD), it reads them once, and the weight once for EACH rows.
// Launcher: ops/norms.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= y.rows
    columns: u32, //= y.columns
    stride: u32, //= y.stride
    parts: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x?: 8
//#input 2 weight: 8 float32
//#output 3 y: 8
@group(0) @binding(4) var<storage, read_write> rstd: array<f32>;
//#input 5 residual?: 8
//#input 6 parts?: 8 float32
//#input 7 added?: 8
//#output 8 sum?: 8 float32 buffer

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
        var total = 0.0;
        //#unroll t TURNS
            let x_$t = first_x(base + at_$t);
            total += select(0.0, dot8(x_$t, x_$t), thread + $tu * THREADS <= last);
        //#end
        let r = inverseSqrt(reduce_sum(total, thread) / f32(params.columns) + params.eps);
        //#unroll t TURNS
            if (thread + $tu * THREADS <= last) {
                var y_$t = multiply8(scale8(x_$t, r), w_$t);
//#if residual
                y_$t = add8(y_$t, load_residual(base + at_$t));
//#endif
                store_y(base + at_$t, y_$t);
            }
        //#end
        if (thread == 0u) {
            rstd[row] = r;
        }
    }
}
//#else
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    var total = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        let v = first_x(base + i);
        total += dot8(v, v);
    }
    let r = inverseSqrt(reduce_sum(total, thread) / f32(params.columns) + params.eps);
    for (var i = thread; i < params.stride; i += THREADS) {
        var v = multiply8(scale8(again_x(base + i), r), load_weight(i));
//#if residual
        v = add8(v, load_residual(base + i));
//#endif
        store_y(base + i, v);
    }
    if (thread == 0u) {
        rstd[row] = r;
    }
}
//#endif

// A unit of x, and the same for the invocation that has had it.
//#if parts
fn first_x(at: u32) -> Eight {
    var v = zero8();
    for (var part = 0u; part < params.parts; part += 1u) {
        v = add8(v, load_parts(part * params.rows * params.stride + at));
    }
//#if added
    v = add8(v, load_added(at));
//#endif
    store_sum(at, v);
    return v;
}

fn again_x(at: u32) -> Eight {
    return eight(sum[at].lo, sum[at].hi);
}
//#else
fn first_x(at: u32) -> Eight {
    return load_x(at);
}

fn again_x(at: u32) -> Eight {
    return load_x(at);
}
//#endif
