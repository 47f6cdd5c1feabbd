// stats[0] += Σ factors · losses.x,  stats[1] += Σ weights,  stats[4] += Σ weights · losses.y,  over the
// micro-batch's batch_info[0] label rows. Overwrites factors[i] = weights[i], or with CONFIDENCE weights[i] · exp(-losses[i].x): times the
// probability of the row's label, a number that no gradient passes through (DFT, arXiv 2508.05629).
// Without weights each is one.
//
// One workgroup of THREADS invocations. Launcher: ops/label_rows.py.
//#include common/row_reduce.wgsl

@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read_write> stats: array<f32>;
@group(0) @binding(4) var<storage, read_write> factors: array<f32>;
//#input 5 weights?: 1 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var sum = 0.0;
    var count = 0.0;
    var right = 0.0;
    for (var i = local.x; i < batch_info[0]; i += THREADS) {
        var weight = 1.0;
//#if weights
        weight = load_weights(i);
//#endif
        count += weight;
        right += weight * losses[i].y;
//#if CONFIDENCE
        weight *= exp(-losses[i].x);
//#endif
        factors[i] = weight;
        sum += weight * losses[i].x;
    }
    let total = reduce_sum(sum, local.x);
    let number = reduce_sum(count, local.x);
    let hits = reduce_sum(right, local.x);
    if (local.x == 0u) {
        stats[0] += total;
        stats[1] += number;
        stats[4] += hits;
    }
}
