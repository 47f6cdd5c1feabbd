// dweights[row, j] = Σ_c dy[row, c] · x[slots[row · top_k + j], c], padded with zeros.
//
// dy (rows, columns), x (·, columns), dweights float32. THREADS invocations share an assignment.
// Launcher: ops/routing.py.
//#include common/row_reduce.wgsl

struct Params {
    assignments: u32,
    stride: u32, //= x.stride
    top_k: u32,
    weight_stride: u32, //= dweights.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 4
//#input 2 x: 4
@group(0) @binding(3) var<storage, read> slots: array<u32>;
@group(0) @binding(4) var<storage, read_write> dweights: array<f32>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last assignment.
    let assignment = min(group.x * ROWS + local.y, params.assignments - 1u);
    let row = assignment / params.top_k;
    let x_at = slots[assignment] * params.stride;
    var sum = 0.0;
    for (var i = local.x; i < params.stride; i += THREADS) {
        sum += dot(load_dy(row * params.stride + i), load_x(x_at + i));
    }
    let total = reduce_sum(sum, local.x);
    if (local.x == 0u) {
        let at = row * params.weight_stride;
        let j = assignment % params.top_k;
        dweights[at + j] = total;
        if (j == 0u) {
            for (var pad = params.top_k; pad < params.weight_stride; pad += 1u) {
                dweights[at + pad] = 0.0;
            }
        }
    }
}
