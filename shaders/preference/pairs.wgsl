// Losses of pairs of samples, chosen before rejected, as functions of their answers' summed log
// probabilities (preference/sums.wgsl) and the reference's; and what the gradient of each label row's
// loss is multiplied by: weights[s] = (of the answer's rows, of the prompt's).
//
// With ODDS the loss is ORPO's: -β log σ(log odds ratio) of mean log probabilities, and the
// chosen's negative log-likelihood times the number that its sample carries (arXiv 2403.07691).
// stats[0] += Σ losses,  stats[1] += pairs,  stats[8 …] += the sums that ops/preference.py names.
// One workgroup of THREADS invocations. Launcher: ops/preference.py.
//#include common/row_reduce.wgsl
//#include common/preference.wgsl

struct Params {
    loss_type: u32,
    beta: f32,
    smoothing: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> sums: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> samples: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> weights: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read_write> stats: array<f32>;

// A loss, and its slopes by the chosen's and by the rejected's log ratio.
//#if !ODDS
fn loss_of(chosen: f32, rejected: f32, chosen_count: f32, rejected_count: f32) -> vec3<f32> {
    let beta = params.beta;
    let smoothing = params.smoothing;
    let x = beta * (chosen - rejected);
    let xc = beta * chosen;
    let xr = beta * rejected;
    switch (params.loss_type) {
        case 0u: { // sigmoid
            let slope = beta * logistic(-x);
            return vec3<f32>(-log_logistic(x), -slope, slope);
        }
        case 1u: { // hinge
            let slope = select(0.0, beta, x < 1.0);
            return vec3<f32>(max(1.0 - x, 0.0), -slope, slope);
        }
        case 2u: { // ipo
            let apart = chosen / chosen_count - rejected / rejected_count - 0.5 / beta;
            return vec3<f32>(apart * apart, 2.0 * apart / chosen_count, -2.0 * apart / rejected_count);
        }
        case 3u: { // robust
            let scale = 1.0 / (1.0 - 2.0 * smoothing);
            let loss = smoothing * log_logistic(-x) - (1.0 - smoothing) * log_logistic(x);
            let slope = beta * scale * ((1.0 - smoothing) * logistic(-x) + smoothing * logistic(x));
            return vec3<f32>(scale * loss, -slope, slope);
        }
        case 4u: { // exo_pair
            let won = log_logistic(x) - accurate_log(1.0 - smoothing);
            let lost = log_logistic(-x) - accurate_log(smoothing);
            let slope = beta * logistic_slope(x) * (won - lost);
            return vec3<f32>(logistic(x) * won + logistic(-x) * lost, slope, -slope);
        }
        case 5u: { // nca_pair
            let loss = -log_logistic(xc) - 0.5 * log_logistic(-xc) - 0.5 * log_logistic(-xr);
            return vec3<f32>(loss, beta * (0.5 * logistic(xc) - logistic(-xc)), 0.5 * beta * logistic(xr));
        }
        case 6u: { // bco_pair
            let loss = -log_logistic(xc) - log_logistic(-xr);
            return vec3<f32>(loss, -beta * logistic(-xc), beta * logistic(xr));
        }
        case 7u: { // sppo_hard
            let won = chosen - 0.5 / beta;
            let lost = rejected + 0.5 / beta;
            return vec3<f32>(won * won + lost * lost, 2.0 * won, 2.0 * lost);
        }
        case 8u: { // apo_zero
            let loss = logistic(-xc) + logistic(xr);
            return vec3<f32>(loss, -beta * logistic_slope(xc), beta * logistic_slope(xr));
        }
        case 9u: { // apo_down
            let slope = beta * logistic_slope(x);
            return vec3<f32>(logistic(xc) + logistic(-x), beta * logistic_slope(xc) - slope, slope);
        }
        default: { // sigmoid_norm
            let z = beta * (chosen / chosen_count - rejected / rejected_count);
            let slope = beta * logistic(-z);
            return vec3<f32>(-log_logistic(z), -slope / chosen_count, slope / rejected_count);
        }
    }
}
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var loss = 0.0;
    var rewards = vec2<f32>(0.0);
    var right = 0.0;
    var logps = vec2<f32>(0.0);
    var odds = vec3<f32>(0.0);
    var tokens = vec2<f32>(0.0);
    let pairs = batch_info[3] / 2u;
    for (var pair = local.x; pair < pairs; pair += THREADS) {
        let chosen = sums[2u * pair];
        let rejected = sums[2u * pair + 1u];
        let first = samples[2u * pair];
//#if ODDS
        let mean = vec2<f32>(chosen.x / chosen.y, rejected.x / rejected.y);
        let left = vec2<f32>(one_minus_exp(mean.x), one_minus_exp(mean.y));
        let log_odds = mean.x - mean.y - accurate_log(left.x) + accurate_log(left.y);
        let ratio = log_logistic(log_odds);
        let likelihood = number_of(first);
        let slope = params.beta * logistic(-log_odds);
        // Rows' losses are negative log probabilities: slopes change their sign.
        weights[2u * pair] = vec2<f32>(likelihood + slope / (left.x * chosen.y), likelihood);
        weights[2u * pair + 1u] = vec2<f32>(-slope / (left.y * rejected.y), 0.0);
        loss += likelihood * chosen.z - params.beta * ratio;
        odds += vec3<f32>(likelihood * chosen.z, ratio, log_odds);
        let own = mean;
        let reward = params.beta * mean;
//#else
        let ratios = vec2<f32>(
            chosen.x - reference_of(first),
            rejected.x - reference_of(samples[2u * pair + 1u]),
        );
        // TRL divides by all tokens of an answer, the first one of a row without a prompt included.
        let counts = vec2<f32>(chosen.y, rejected.y)
            + vec2<f32>(number_of(first), number_of(samples[2u * pair + 1u]));
        let found = loss_of(ratios.x, ratios.y, counts.x, counts.y);
        weights[2u * pair] = vec2<f32>(-found.y, 0.0);
        weights[2u * pair + 1u] = vec2<f32>(-found.z, 0.0);
        loss += found.x;
        let own = vec2<f32>(chosen.x, rejected.x);
        let reward = params.beta * ratios;
//#endif
        rewards += reward;
        tokens += chosen.wy;
        right += select(0.0, 1.0, reward.x > reward.y);
        logps += own;
    }
    loss = reduce_sum(loss, local.x);
    rewards = vec2<f32>(reduce_sum(rewards.x, local.x), reduce_sum(rewards.y, local.x));
    right = reduce_sum(right, local.x);
    logps = vec2<f32>(reduce_sum(logps.x, local.x), reduce_sum(logps.y, local.x));
    tokens = vec2<f32>(reduce_sum(tokens.x, local.x), reduce_sum(tokens.y, local.x));
//#if ODDS
    odds.x = reduce_sum(odds.x, local.x);
    odds.y = reduce_sum(odds.y, local.x);
    odds.z = reduce_sum(odds.z, local.x);
//#endif
    if (local.x > 0u) {
        return;
    }
    stats[0] += loss;
    stats[1] += f32(pairs);
    stats[8] += rewards.x;
    stats[9] += rewards.y;
    stats[10] += logps.x;
    stats[11] += logps.y;
    stats[12] += f32(pairs);
    stats[13] += f32(pairs);
    stats[14] += right;
    stats[20] += tokens.x;
    stats[21] += tokens.y;
//#if ODDS
    stats[15] += odds.x;
    stats[16] += odds.y;
    stats[17] += odds.z;
//#endif
}
