// Losses of single samples, of which each is desirable (its number is 1) or not (0), as functions of
// their answers' summed log probabilities (preference/sums.wgsl) and the reference's: KTO's (arXiv
// 2402.01306), or with ZERO the unpaired APO-zero; and weights[s] as preference/pairs.wgsl has them.
//
// KTO's point of reference is stats[18] / stats[19], at least 0 (preference/divergence.wgsl).
// stats[0] += Σ losses,  stats[1] += samples,  stats[8 …] += the sums that ops/preference.py names.
// One workgroup of THREADS invocations. Launcher: ops/preference.py.
//#include common/row_reduce.wgsl
//#include common/preference.wgsl

struct Params {
    beta: f32,
    desirable: f32,
    undesirable: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sums: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> samples: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> weights: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var divergence = 0.0;
//#if !ZERO
    if (stats[19] > 0.0) {
        divergence = max(stats[18] / stats[19], 0.0);
    }
//#endif
    var loss = 0.0;
    var rewards = vec2<f32>(0.0);
    var logps = vec2<f32>(0.0);
    var good = 0.0;
    for (var s = local.x; s < batch_info[3]; s += THREADS) {
        let sample = samples[s];
        let ratio = sums[s].x - reference_of(sample);
        let is_good = number_of(sample) > 0.5;
        let sign = select(-1.0, 1.0, is_good);
        let weight = select(params.undesirable, params.desirable, is_good);
        let z = sign * params.beta * (ratio - divergence);
        loss += weight * logistic(-z);
        // Rows' losses are negative log probabilities: slopes change their sign.
        weights[s] = vec2<f32>(sign * weight * params.beta * logistic_slope(z), 0.0);
        let place = select(vec2<f32>(0.0, 1.0), vec2<f32>(1.0, 0.0), is_good);
        rewards += place * params.beta * ratio;
        logps += place * sums[s].x;
        good += place.x;
    }
    loss = reduce_sum(loss, local.x);
    rewards = vec2<f32>(reduce_sum(rewards.x, local.x), reduce_sum(rewards.y, local.x));
    logps = vec2<f32>(reduce_sum(logps.x, local.x), reduce_sum(logps.y, local.x));
    good = reduce_sum(good, local.x);
    if (local.x > 0u) {
        return;
    }
    stats[0] += loss;
    stats[1] += f32(batch_info[3]);
    stats[8] += rewards.x;
    stats[9] += rewards.y;
    stats[10] += logps.x;
    stats[11] += logps.y;
    stats[12] += good;
    stats[13] += f32(batch_info[3]) - good;
}
