// dx (+)= rstd · (g - mean(g) - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = (x - mean) · rstd.
//
// dy, x, dx (rows, columns), weight (columns) float32, stats (rows) of (mean, rstd). dx is
// overwritten or (ACCUMULATE) added to; dx_operand, if bound, is what is then in dx. Their padding
// stays zero. THREADS invocations share a row. Launcher: ops/norms.py.
//#include common/row_reduce.wgsl
//#include common/norm_gradient.wgsl
//#include common/columns.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 x: 8
//#input 3 weight: 8 float32
@group(0) @binding(4) var<storage, read> stats: array<vec2<f32>>;
//#output 5 dx: 8 sum
//#output 6 dx_operand?: 8
//#input 7 dx_before?: 8 float32 texture

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let wanted = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(wanted, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    let mean = stats[row].x;
    let r = stats[row].y;
    var sum = 0.0;
    var product = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        // The weight's padding is zero.
        let g = multiply8(load_dy(base + i), load_weight(i));
        sum += dot(g.even + g.odd, vec4<f32>(1.0));
        product += dot8(g, minus(load_x(base + i), mean));
    }
    let g_mean = reduce_sum(sum, thread) / f32(params.columns);
    let gx_mean = r * r * reduce_sum(product, thread) / f32(params.columns);
    if (wanted < params.rows) {
        for (var i = thread; i < params.stride; i += THREADS) {
            let g = multiply8(load_dy(base + i), load_weight(i));
            let d = add_scaled8(minus(g, g_mean), -gx_mean, minus(load_x(base + i), mean));
            store_both(base + i, live8(i, scale8(d, r)));
        }
    }
}

fn minus(v: Eight, s: f32) -> Eight {
    return Eight(v.even - s, v.odd - s);
}
