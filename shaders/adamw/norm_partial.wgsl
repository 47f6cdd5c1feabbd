// squares[first + w] = Σ g² over the slice of the flat gradient that row w of invocations owns.
//
// g in units of four; SUMS of squares overwritten. THREADS invocations share a sum, whose
// order is always the same. Launcher: ops/adamw.py.
//#include common/row_reduce.wgsl

struct Params {
    units: u32,
    first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 g: 4 buffer
@group(0) @binding(2) var<storage, read_write> squares: array<f32>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let own = group.x * ROWS + local.y;
    var sum = 0.0;
    for (var i = own * THREADS + local.x; i < params.units; i += SUMS * THREADS) {
        let part = load_g(i);
        sum += dot(part, part);
    }
    let total = reduce_sum(sum, local.x);
    if (local.x == 0u) {
        squares[params.first + own] = total;
    }
}
