// The loss of each label row by TRL's formulas for GRPO and its kin, of the ratio of probabilities
// r = exp(log p - old), or with SEQUENCE of its sample's, an advantage A and a weight w:
//   clipped (0): -min(min(r, δ)·A, clamp(r, 1 - ε, 1 + ε_high)·A)
//   cispo   (1): -min(r, ε_high)·A·log p, where no gradient passes through r
//   sapo    (2): -4/τ · σ(τ·(r - 1)) · A, τ by the sign of A
// with REFERENCE plus β·KL, KL = exp(ref - log p) - (ref - log p) - 1, times r with CORRECTION.
//   terms[i] = (w · loss, KL, min(r, δ) < 1 - ε and A < 0, min(r, δ) > 1 + ε_high and A > 0)
//   factors[i] = -w · d loss / d log p: rows' losses are negative log probabilities.
// Of cispo the last term is r > ε_high and A > 0. With SUMMED the slope of r by log p is not divided by
// the sample's number of labels. With ON_POLICY old is log p itself, so that r is 1. With a threshold only
// rows whose entropy, losses[i].y, reaches the threshold have one of these losses; all have the KL.
//
// completions: of each label row log p when it was sampled, and the reference's; w; and A. One
// invocation a label row. Launcher: ops/policy.py.
//#include common/flat.wgsl
//#include common/logistic.wgsl

struct Params {
    count: u32, //= factors.columns
    loss: u32,
    beta: f32,
    epsilon: f32,
    epsilon_high: f32,
    delta: f32,
    positive: f32,
    negative: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> completions: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
//#if SEQUENCE
@group(0) @binding(4) var<storage, read> row_samples: array<u32>;
//#if threshold
@group(0) @binding(5) var<storage, read> ratios: array<vec4<f32>>;
//#else
@group(0) @binding(5) var<storage, read> ratios: array<vec2<f32>>;
//#endif
//#endif
@group(0) @binding(6) var<storage, read_write> terms: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> factors: array<f32>;
//#if threshold
@group(0) @binding(8) var<storage, read> threshold: array<f32>;
//#endif

// A loss, and its slope by the logarithm of the ratio.
fn loss_of(ratio: f32, advantage: f32, logp: f32) -> vec2<f32> {
    switch (params.loss) {
        case 0u: {
            let bounded = min(ratio, params.delta) * advantage;
            let clipped = clamp(ratio, 1.0 - params.epsilon, 1.0 + params.epsilon_high) * advantage;
            let inside = ratio >= 1.0 - params.epsilon && ratio <= 1.0 + params.epsilon_high;
            let moves = select(ratio <= params.delta, inside, clipped < bounded);
            return vec2<f32>(-min(bounded, clipped), select(0.0, -ratio * advantage, moves));
        }
        case 1u: {
            let slope = -min(ratio, params.epsilon_high) * advantage;
            return vec2<f32>(slope * logp, slope);
        }
        default: {
            let temperature = select(params.negative, params.positive, advantage > 0.0);
            let x = vec4<f32>(temperature * (ratio - 1.0));
            let loss = -4.0 / temperature * sigmoid(x).x * advantage;
            return vec2<f32>(loss, -4.0 * sigmoid_gradient(x).x * ratio * advantage);
        }
    }
}

fn each(i: u32) {
    if (i < params.count && i < batch_info[0]) {
        let row = completions[i];
        let advantage = row.w;
        let logp = -losses[i].x;
//#if SEQUENCE
        let of_sample = ratios[row_samples[i] / 2u];
        let ratio = exp(of_sample.x);
//#else
//#if ON_POLICY
        let ratio = 1.0;
//#else
        let ratio = exp(logp - row.x);
//#endif
//#endif
        var made = loss_of(ratio, advantage, logp);
//#if threshold
        let kept = select(0.0, 1.0, losses[i].y >= threshold[0]);
//#if SEQUENCE
        // The ratio depends on all rows of the sample, so each has its share of those that are kept.
        made *= vec2<f32>(kept, select(of_sample.z, kept, params.loss == 1u));
//#else
        made *= kept;
//#endif
//#endif
        var divergence = 0.0;
//#if REFERENCE
        let apart = row.y - logp;
        divergence = exp(apart) - apart - 1.0;
        var slope = 1.0 - exp(apart);
//#if CORRECTION
//#if SEQUENCE
        slope = ratio * (slope + of_sample.y);
//#else
        slope = ratio * (slope + divergence);
//#endif
        divergence *= ratio;
//#endif
        made += params.beta * vec2<f32>(divergence, slope);
//#endif
        let bounded = min(ratio, params.delta);
        let low = bounded < 1.0 - params.epsilon && advantage < 0.0;
        let highest = select(1.0 + params.epsilon_high, params.epsilon_high, params.loss == 1u);
        let high = bounded > highest && advantage > 0.0;
        terms[i] = vec4<f32>(row.z * made.x, divergence, f32(low), f32(high));
        factors[i] = -row.z * made.y;
//#if SUMMED
        factors[i] *= of_sample.y;
//#endif
    }
}
