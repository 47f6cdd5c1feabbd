// The top_k experts of each row and their weights, where scores of their own are what chooses:
//   s[e] = sigmoid(logits[row, e]) (SIGMOID), or the softmax over all experts;
//   ids[row, ·] = the experts with the largest s[e] + bias[e], the largest first, of equal ones the
//   first; with GROUPED those of top_groups groups of neighbours alone, a group's rank being its
//   largest s + bias or (PAIRS) the sum of its two largest;
//   weights[row, j] = scale · s[ids[row, j]], divided (NORMALIZED) by their sum before scale,
//   to which `least` is added or (AT_LEAST) which is `least` at least.
//
// logits (rows, experts) float32, bias (experts); ids (rows · top_k) and weights (rows, top_k)
// float32, padded with zeros, are overwritten. Launcher: ops/routing.py.
//#include common/flat.wgsl
//#include common/expert_scores.wgsl

struct Params {
    rows: u32, //= logits.rows
    experts: u32,
    logit_stride: u32, //= logits.stride
    top_k: u32,
    weight_stride: u32, //= weights.stride
    groups: u32,
    top_groups: u32,
    least: f32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
//#if bias
@group(0) @binding(2) var<storage, read> bias: array<f32>;
//#endif
@group(0) @binding(3) var<storage, read_write> ids: array<u32>;
@group(0) @binding(4) var<storage, read_write> weights: array<f32>;

const NONE = -1.0e38; // below all scores, and so are two of them together

fn preference(scale: Softmax, base: u32, e: u32) -> f32 {
    let score = score_of(logits[base + e], scale);
//#if bias
    return score + bias[e];
//#else
    return score;
//#endif
}
//#if GROUPED

fn rank(scale: Softmax, base: u32, group: u32) -> f32 {
    let size = params.experts / params.groups;
    var first = NONE;
    var second = NONE;
    for (var e = group * size; e < (group + 1u) * size; e += 1u) {
        let value = preference(scale, base, e);
        second = max(second, min(first, value));
        first = max(first, value);
    }
//#if PAIRS
    return first + second;
//#else
    return first;
//#endif
}

// The chosen groups, a bit for each.
fn open_groups(scale: Softmax, base: u32) -> u32 {
    var open = 0u;
    for (var count = 0u; count < params.top_groups; count += 1u) {
        var best = NONE;
        var best_group = params.groups;
        for (var group = 0u; group < params.groups; group += 1u) {
            if ((open & (1u << group)) == 0u) {
                let value = rank(scale, base, group);
                if (best_group == params.groups || value > best) {
                    best = value;
                    best_group = group;
                }
            }
        }
        open |= 1u << min(best_group, params.groups - 1u);
    }
    return open;
}
//#endif

fn each(row: u32) {
    if (row >= params.rows) {
        return;
    }
    let base = row * params.logit_stride;
    let out = row * params.weight_stride;
    let softmax = softmax_of(base);
//#if GROUPED
    let open = open_groups(softmax, base);
//#endif
    var total = 0.0;
    var last = 0.0;
    var last_id = 0u;
    for (var j = 0u; j < params.top_k; j += 1u) {
        var best = NONE;
        var best_id = params.experts;
        for (var e = 0u; e < params.experts; e += 1u) {
//#if GROUPED
            if ((open & (1u << (e / (params.experts / params.groups)))) == 0u) {
                continue;
            }
//#endif
            let value = preference(softmax, base, e);
            // In falling order: what comes after the last one chosen.
            let remains = j == 0u || value < last || (value == last && e > last_id);
            if (remains && (best_id == params.experts || value > best)) {
                best = value;
                best_id = e;
            }
        }
        // NaN is never chosen twice: the step is refused for its norm later.
        best_id = min(best_id, params.experts - 1u);
        last = best;
        last_id = best_id;
        ids[row * params.top_k + j] = best_id;
        let weight = score_of(logits[base + best_id], softmax);
        weights[out + j] = weight;
        total += weight;
    }
    let below = divisor(total);
    for (var j = 0u; j < params.top_k; j += 1u) {
        weights[out + j] = params.scale * weights[out + j] / below;
    }
    for (var j = params.top_k; j < params.weight_stride; j += 1u) {
        weights[out + j] = 0.0;
    }
}
