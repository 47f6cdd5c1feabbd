// dx (+)= rstd · (g - x̂ · mean(g · x̂)),  g = dy · weight,  x̂ = x · rstd, over each row.
//
// dy (rows, columns) float32 or (DY_BF16) bfloat16, x, dx (rows, columns) float32, weight (columns), rstd (rows). dx is overwritten or
// (ACCUMULATE) added to. LANES invocations share a row. Launcher: ops/rms_norm.py.
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
@group(0) @binding(4) var<storage, read> rstd: array<f32>;
@group(0) @binding(5) var<storage, read_write> dx: array<vec4<f32>>;

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let wanted = (group.y * groups.x + group.x) * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(wanted, params.rows - 1u);
    let lane = local.x;
    let base = row * params.stride;
    let r = rstd[row];
    var sum = 0.0;
    for (var i = lane; i < params.stride; i += LANES) {
        sum += dot(gradient(base + i) * weight[i], x[base + i]);
    }
    let mean = r * reduce_sum(sum, lane) / f32(params.columns);
    if (wanted < params.rows) {
        for (var i = lane; i < params.stride; i += LANES) {
            let d = r * (gradient(base + i) * weight[i] - x[base + i] * (r * mean));
//#if ACCUMULATE
            dx[base + i] += d;
//#else
            dx[base + i] = d;
//#endif
        }
    }
}
