// squares[w] = Σ g² over what row w of invocations owns of the flat gradient, of which g is a piece.
//
// g in units of four, the first of them unit `begin` of the whole; SUMS of squares overwritten.
// THREADS invocations share a sum; unit i belongs to invocation i mod SUMS·THREADS, which goes on
// with what is carried, its sum so far, if there are several pieces. Launcher: ops/optimizers.py.
//#include common/row_reduce.wgsl

struct Params {
    units: u32, //= g.units
    begin: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 g: 4 buffer
@group(0) @binding(2) var<storage, read_write> squares: array<f32>;
//#if carried
@group(0) @binding(3) var<storage, read_write> carried: array<f32>;
//#endif

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let own = group.x * ROWS + local.y;
    let invocation = own * THREADS + local.x;
    let turn = SUMS * THREADS;
    var sum = 0.0;
    var first = invocation;
//#if carried
    sum = select(0.0, carried[invocation], params.begin > 0u);
    first = (invocation + turn - params.begin % turn) % turn;
//#endif
    for (var i = first; i < params.units; i += turn) {
        let part = load_g(i);
        sum += dot(part, part);
    }
//#if carried
    carried[invocation] = sum;
//#endif
    let total = reduce_sum(sum, local.x);
    if (local.x == 0u) {
        squares[own] = total;
    }
}
