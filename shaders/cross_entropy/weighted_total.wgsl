// stats[0] += Σ factors · losses,  stats[1] += Σ weights,  over the micro-batch's batch_info[0] label
// rows. Overwrites factors[i] = weights[i], or with CONFIDENCE weights[i] · exp(-losses[i]): times the
// probability of the row's label, a number that no gradient passes through (DFT, arXiv 2508.05629).
// Without weights each is one.
//
// One workgroup of THREADS invocations. Launcher: ops/loss_weights.py.
//#include common/row_reduce.wgsl

@group(0) @binding(1) var<storage, read> losses: array<f32>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read_write> stats: array<f32>;
@group(0) @binding(4) var<storage, read_write> factors: array<f32>;
//#input 5 weights?: 1 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var sum = 0.0;
    var count = 0.0;
    for (var i = local.x; i < batch_info[0]; i += THREADS) {
        var weight = 1.0;
//#if weights
        weight = load_weights(i);
//#endif
        count += weight;
//#if CONFIDENCE
        weight *= exp(-losses[i]);
//#endif
        factors[i] = weight;
        sum += weight * losses[i];
    }
    let total = reduce_sum(sum, local.x);
    let number = reduce_sum(count, local.x);
    if (local.x == 0u) {
        stats[0] += total;
        stats[1] += number;
    }
}
