// y = act(max(gate - cut, 0)) · up, with cut = mean(gate) + deviations · std(gate) over each row.
//
// gate, up, y (rows, columns); y is overwritten, its padding with zeros. THREADS invocations share a
// row. Launcher: ops/pointwise.py.
//#include common/row_reduce.wgsl
//#include common/activation.wgsl
//#include common/columns.wgsl
//#include common/sparse_rows.wgsl

struct Params {
    rows: u32, //= gate.rows
    columns: u32, //= gate.columns
    stride: u32, //= gate.stride
    deviations: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 gate: 8
//#input 2 up: 8
//#output 3 y: 8

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last row.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let base = row * params.stride;
    let spread = spread_of(base, local.x);
    for (var u = local.x; u < params.stride; u += THREADS) {
        let kept = cut_off(load_gate(base + u), spread);
        store_y(base + u, multiply8(activate8(kept), load_up(base + u)));
    }
}
