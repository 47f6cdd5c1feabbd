// dx (+)= rstd · (g - mean(g) - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = (x - mean) · rstd.
//
// dy (rows, columns) float32 or (DY_BF16) bfloat16, x, dx (rows, columns) float32, weight (columns), stats (rows) of (mean, rstd). dx is
// overwritten or (ACCUMULATE) added to; its padding stays zero. LANES invocations share a row.
// Launcher: ops/layer_norm.py.
//#include common/row_reduce.wgsl
//#include common/gradient_in.wgsl

struct Params {
    rows: u32,
    columns: u32,
    stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> stats: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read_write> dx: array<vec4<f32>>;

fn live(unit: u32) -> vec4<bool> {
    return vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.columns);
}

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let wanted = (group.y * groups.x + group.x) * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(wanted, params.rows - 1u);
    let lane = local.x;
    let base = row * params.stride;
    let mean = stats[row].x;
    let r = stats[row].y;
    var sum = 0.0;
    var product = 0.0;
    for (var i = lane; i < params.stride; i += LANES) {
        // The weight's padding is zero.
        let g = gradient(base + i) * weight[i];
        sum += dot(g, vec4<f32>(1.0));
        product += dot(g, x[base + i] - mean);
    }
    let g_mean = reduce_sum(sum, lane) / f32(params.columns);
    let gx_mean = r * r * reduce_sum(product, lane) / f32(params.columns);
    if (wanted < params.rows) {
        for (var i = lane; i < params.stride; i += LANES) {
            let d = r * (gradient(base + i) * weight[i] - g_mean - (x[base + i] - mean) * gx_mean);
            let kept = select(vec4<f32>(0.0), d, live(i));
//#if ACCUMULATE
            dx[base + i] += kept;
//#else
            dx[base + i] = kept;
//#endif
        }
    }
}
