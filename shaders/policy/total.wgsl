// stats[0] += Σ terms.x,  stats[1] += Σ shares of samples,  and from stats[8] on: KL, clipped low, clipped
// high and clipped at all, summed over label rows (what is clipped with SEQUENCE over samples); label rows; samples; the smallest share of a
// sample's rows that are clipped low, and the largest that are clipped high; the sum of entropies, losses.y.
//
// samples: (first label row, one past the last, share as bits of float32, unused). One workgroup of
// THREADS invocations. Launcher: ops/policy.py.
//#include common/row_reduce.wgsl

@group(0) @binding(1) var<storage, read> terms: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> samples: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> stats: array<f32>;
@group(0) @binding(5) var<storage, read> losses: array<vec2<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var sum = vec4<f32>(0.0);
    var entropy = 0.0;
    for (var i = local.x; i < batch_info[0]; i += THREADS) {
        sum += terms[i];
        entropy += losses[i].y;
    }
    var shares = 0.0;
    var low = -1.0; // negative, since maxima are reduced
    var high = 0.0;
//#if SEQUENCE
    var of_samples = vec2<f32>(0.0);
//#endif
    for (var s = local.x; s < batch_info[3]; s += THREADS) {
        let sample = samples[s];
        var clipped = vec2<f32>(0.0);
        for (var i = sample.x; i < sample.y; i += 1u) {
            clipped += terms[i].zw;
        }
        clipped /= f32(sample.y - sample.x);
//#if SEQUENCE
        of_samples += clipped;
//#endif
        shares += bitcast<f32>(sample.z);
        low = max(low, -clipped.x);
        high = max(high, clipped.y);
    }
//#if SEQUENCE
    sum.z = of_samples.x;
    sum.w = of_samples.y;
//#endif
    //#unroll i 4: let sum_$i = reduce_sum(sum[$i], local.x);
    shares = reduce_sum(shares, local.x);
    entropy = reduce_sum(entropy, local.x);
    low = -reduce_max(low, local.x);
    high = reduce_max(high, local.x);
    if (local.x > 0u || batch_info[3] == 0u) {
        return;
    }
    let is_first = stats[13] == 0.0;
    stats[0] += sum_0;
    stats[1] += shares;
    stats[8] += sum_1;
    stats[9] += sum_2;
    stats[10] += sum_3;
    stats[11] += sum_2 + sum_3;
    stats[12] += f32(batch_info[0]);
    stats[13] += f32(batch_info[3]);
    stats[14] = select(min(stats[14], low), low, is_first);
    stats[15] = max(stats[15], high);
    stats[16] += entropy;
}
