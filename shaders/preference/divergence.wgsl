// stats[18] += Σ (log p of a sample's answer - the reference's),  stats[19] += their number: the KL
// divergence that KTO measures from, over answers that belong to other prompts.
//
// One workgroup of THREADS invocations. Launcher: ops/preference.py.
//#include common/row_reduce.wgsl
//#include common/preference.wgsl

@group(0) @binding(1) var<storage, read> sums: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> samples: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var sum = 0.0;
    for (var s = local.x; s < batch_info[3]; s += THREADS) {
        sum += sums[s].x - reference_of(samples[s]);
    }
    let total = reduce_sum(sum, local.x);
    if (local.x == 0u) {
        stats[18] += total;
        stats[19] += f32(batch_info[3]);
    }
}
