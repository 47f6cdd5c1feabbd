// dweights[row, j] = Σ_c dy[row, c] · x[places[row · top + j], c], padded with zeros.
//
// dy (rows, columns) float32, x (·, columns) operand. LANES invocations share a choice.
// Launcher: ops/routing.py.
//#include common/unit4.wgsl
//#include common/row_reduce.wgsl

struct Params {
    choices: u32,
    stride: u32,
    top: u32,
    weight_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> x: array<Unit4>;
@group(0) @binding(3) var<storage, read> places: array<u32>;
@group(0) @binding(4) var<storage, read_write> dweights: array<f32>;

@compute @workgroup_size(LANES, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last choice.
    let choice = min((group.y * groups.x + group.x) * ROWS + local.y, params.choices - 1u);
    let row = choice / params.top;
    let x_at = places[choice] * params.stride;
    var sum = 0.0;
    for (var i = local.x; i < params.stride; i += LANES) {
        sum += dot(dy[row * params.stride + i], unpack4(x[x_at + i]));
    }
    let total = reduce_sum(sum, local.x);
    if (local.x == 0u) {
        let at = row * params.weight_stride;
        let j = choice % params.top;
        dweights[at + j] = total;
        if (j == 0u) {
            for (var pad = params.top; pad < params.weight_stride; pad += 1u) {
                dweights[at + pad] = 0.0;
            }
        }
    }
}
