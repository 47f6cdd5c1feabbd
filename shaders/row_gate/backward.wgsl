// dx[row, :] = s · dy[row, :],  dgate[row] = s · (1 - s) · Σ_c dy[row, c] · x[row, c],
// s = sigmoid(gate[row]).
//
// dy, x, dx (rows, columns), gate and dgate (rows, 1) with gate_stride elements to a row; both
// outputs overwritten, dgate's padding with zeros. THREADS invocations share a row.
// Launcher: ops/pointwise.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= x.rows
    stride: u32, //= x.stride
    gate_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 x: 8
//#input 3 gate: 1
//#output 4 dx: 8
@group(0) @binding(5) var<storage, read_write> dgate: array<f32>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let thread = local.x;
    let base = row * params.stride;
    let share = 1.0 / (1.0 + exp(-load_gate(row * params.gate_stride)));
    var sum = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        let dy = load_dy(base + i);
        sum += dot8(dy, load_x(base + i));
        store_dx(base + i, scale8(dy, share));
    }
    let total = reduce_sum(sum, thread);
    if (thread == 0u) {
        let at = row * params.gate_stride;
        dgate[at] = share * (1.0 - share) * total;
        for (var pad = 1u; pad < params.gate_stride; pad += 1u) {
            dgate[at + pad] = 0.0;
        }
    }
}
