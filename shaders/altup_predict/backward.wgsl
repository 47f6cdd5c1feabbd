// dx_i = dy_i + Σ_j coefs[j · STREAMS + i] · dy_j,  dcoefs[j · STREAMS + i] = Σ_columns x_i · dy_j,
// row by row: the gradients of altup_predict/forward.wgsl.
//
// x, dy, dx are the active stream, the others as there; dy or dy_others may be absent. All outputs
// are overwritten, dcoefs' padding with zeros. THREADS invocations share a row.
// Launcher: ops/altup.py.
//#include common/row_reduce.wgsl
//#include common/altup.wgsl

struct Params {
    rows: u32, //= x.rows
    units: u32, //= x.units
    stride: u32, //= x.stride
    coefs_stride: u32, //= coefs.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 others: 8
//#input 3 coefs: 1
//#input 4 dy?: 8
//#input 5 dy_others?: 8
//#output 6 dx: 8
//#output 7 dothers: 8
@group(0) @binding(8) var<storage, read_write> dcoefs: array<f32>;

fn stream(j: u32, at: u32) -> Eight {
    if (j == ACTIVE) {
        return load_x(at);
    }
    return load_others(first_unit(j) + at);
}

fn gradient(j: u32, at: u32) -> Eight {
    if (j == ACTIVE) {
        return load_dy(at);
    }
    return load_dy_others(first_unit(j) + at);
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    let c = row * params.coefs_stride;
    //#unroll j STREAMS, i STREAMS: var sum_$j_$i = 0.0;
    for (var u = thread; u < params.stride; u += THREADS) {
        //#unroll j STREAMS: let dy_$j = gradient($ju, base + u);
        //#unroll i STREAMS
            let x_$i = stream($iu, base + u);
            var dx_$i = dy_$i;
            //#unroll j STREAMS
                dx_$i = add_scaled8(dx_$i, load_coefs(c + $ju * STREAMS + $iu), dy_$j);
                sum_$j_$i += dot8(x_$i, dy_$j);
            //#end
            if ($iu == ACTIVE) {
                store_dx(base + u, dx_$i);
            } else {
                store_dothers(first_unit($iu) + base + u, dx_$i);
            }
        //#end
    }
    //#unroll j STREAMS, i STREAMS: let total_$j_$i = reduce_sum(sum_$j_$i, thread);
    if (thread == 0u) {
        //#unroll j STREAMS, i STREAMS: dcoefs[c + $ju * STREAMS + $iu] = total_$j_$i;
        for (var pad = STREAMS * STREAMS; pad < params.coefs_stride; pad += 1u) {
            dcoefs[c + pad] = 0.0;
        }
    }
}
