// The loss that balances experts, of a micro-batch of n labels, and its gradient: batch_info[0] of
// them, or where labels have weights the sum of these. With N = Σ_e sums[0, e] / top_k rows, over all layers that have a router:
//   stats[5] += n · experts · Σ_e (sums[0, e] / N) · (sums[1, e] / N),
//   dsums[1, e] = n · coefficient · experts · sums[0, e] / N²,  dsums[0] = 0.
//
// sums, dsums (2, experts) float32, dsums overwritten, padded with zeros. One workgroup of THREADS
// invocations. Launcher: ops/routing.py.
//#include common/row_reduce.wgsl

struct Params {
    experts: u32,
    stride: u32, //= dsums.stride
    top_k: u32,
    coefficient: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sums: array<f32>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read_write> stats: array<f32>;
@group(0) @binding(4) var<storage, read_write> dsums: array<f32>;
//#input 5 weights?: 1 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var chosen = 0.0;
    for (var e = local.x; e < params.experts; e += THREADS) {
        chosen += sums[e];
    }
    let rows = max(reduce_sum(chosen, local.x) / f32(params.top_k), 1.0);
//#if weights
    var weight = 0.0;
    for (var i = local.x; i < batch_info[0]; i += THREADS) {
        weight += load_weights(i);
    }
    let labels = reduce_sum(weight, local.x);
//#else
    let labels = f32(batch_info[0]);
//#endif
    var terms = 0.0;
    for (var e = local.x; e < params.stride; e += THREADS) {
        // Of the padding all is zero.
        let share = f32(params.experts) * labels * (sums[e] / rows);
        terms += share * (sums[params.stride + e] / rows);
        dsums[e] = 0.0;
        dsums[params.stride + e] = params.coefficient * (share / rows);
    }
    // A sum last: what is added has the same bits wherever it is added.
    let loss = reduce_sum(terms, local.x);
    if (local.x == 0u) {
        stats[5] += loss;
    }
}
