// scores[i · classes + c] = Σ_h x[i, h] · w[c, h].
//
// x (rows, columns) of any type, w (classes, columns) and scores float32; scores overwritten.
// THREADS invocations share a score. Launcher: ops/score.py.
//#include common/row_reduce.wgsl

struct Params {
    scores: u32,
    classes: u32, //= w.rows
    x_stride: u32,
    w_stride: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 w: 8 float32
@group(0) @binding(3) var<storage, read_write> scores: array<f32>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: one past the end repeats the last score.
    let at = min(group.x * ROWS + local.y, params.scores - 1u);
    let x_at = at / params.classes * params.x_stride;
    let w_at = at % params.classes * params.w_stride;
    var sum = 0.0;
    for (var i = local.x; i < params.x_stride; i += THREADS) {
        sum += dot8(load_x(x_at + i), load_w(w_at + i));
    }
    let score = reduce_sum(sum, local.x);
    if (local.x == 0u) {
        scores[at] = score;
    }
}
