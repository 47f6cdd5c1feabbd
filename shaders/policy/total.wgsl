// stats[0] += Σ terms.x,  stats[1] += Σ shares of samples,  and from stats[8] on what TRL logs of a micro-batch:
// the means over its label rows of KL, clipped low, clipped high and clipped at all (what is clipped with
// SEQUENCE over samples); 1; 1 if the next two exist; the smallest share of a sample's rows that are clipped
// low, and the largest that are clipped high; the mean of entropies, losses.y.
//
// samples: (first label row, one past the last, share and advantage as bits of float32). Those without label
// rows only have a share; with SEQUENCE what is clipped, and with SUMMED the loss, is that of ratio 1.
// One workgroup of THREADS invocations. Launcher: ops/policy.py.
//#include common/row_reduce.wgsl

//#if SEQUENCE
struct Params {
    low: f32, // 1 if a ratio of 1 is clipped low, else 0
    high: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#endif
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
    var low = -2.0; // negative, since maxima are reduced; below those of any share
    var high = 0.0;
//#if SEQUENCE
    var of_samples = vec2<f32>(0.0);
//#endif
    for (var s = local.x; s < batch_info[3]; s += THREADS) {
        let sample = samples[s];
        shares += bitcast<f32>(sample.z);
        let is_empty = sample.y == sample.x;
//#if SUMMED
        sum.x -= select(0.0, bitcast<f32>(sample.w), is_empty);
//#endif
        var clipped = vec2<f32>(0.0);
        if (is_empty) {
//#if SEQUENCE
            let advantage = bitcast<f32>(sample.w);
            clipped = vec2<f32>(
                select(0.0, params.low, advantage < 0.0), select(0.0, params.high, advantage > 0.0)
            );
//#else
            continue;
//#endif
        }
        for (var i = sample.x; i < sample.y; i += 1u) {
            clipped += terms[i].zw;
        }
        clipped /= f32(max(sample.y - sample.x, 1u));
//#if SEQUENCE
        of_samples += clipped;
//#endif
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
    let rows = f32(max(batch_info[0], 1u));
    var counted = rows;
//#if SEQUENCE
    counted = f32(batch_info[3]);
//#endif
    stats[0] += sum_0;
    stats[1] += shares;
    stats[8] += sum_1 / rows;
    stats[9] += sum_2 / counted;
    stats[10] += sum_3 / counted;
    stats[11] += (sum_2 + sum_3) / counted;
    stats[12] += 1.0;
    if (low <= 1.0) {
        stats[13] += 1.0;
        stats[14] += low;
        stats[15] += high;
    }
    stats[16] += entropy / rows;
}
