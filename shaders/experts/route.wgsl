// The top_k experts of each row and their weights, from the router's logits:
//   ids[row, j] = the expert with the j-th largest logit, weights[row, j] = softmax of the logits
// over all experts, or (NORMALIZED) over the chosen ones, times scale. Of equal logits the first
// comes first.
//
// logits (rows, experts) float32; ids (rows · top_k) and weights (rows, top_k) float32, padded with
// zeros, are overwritten. Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= logits.rows
    experts: u32,
    logit_stride: u32, //= logits.stride
    top_k: u32,
    weight_stride: u32, //= weights.stride
    scale: f32,
    unscale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read_write> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> weights: array<f32>;

fn each(row: u32) {
    if (row >= params.rows) {
        return;
    }
    let base = row * params.logit_stride;
    let out = row * params.weight_stride;
    var highest = 0.0;
    var total = 0.0;
    var last = 0.0;
    var last_id = 0u;
    for (var j = 0u; j < params.top_k; j += 1u) {
        var best = 0.0; // the first is taken whatever it is
        var best_id = params.experts;
        for (var e = 0u; e < params.experts; e += 1u) {
            let logit = logits[base + e];
            // In falling order: what comes after the last one chosen.
            let remains = j == 0u || logit < last || (logit == last && e > last_id);
            if (remains && (best_id == params.experts || logit > best)) {
                best = logit;
                best_id = e;
            }
        }
        // NaN logits are never chosen twice: the step is refused for its norm later.
        best_id = min(best_id, params.experts - 1u);
        last = best;
        last_id = best_id;
        if (j == 0u) {
            highest = best;
        }
        ids[row * params.top_k + j] = best_id;
        let weight = exp(best - highest);
        weights[out + j] = weight;
        total += weight;
    }
//#if NORMALIZED
    let sum = total;
//#else
    var sum = 0.0;
    for (var e = 0u; e < params.experts; e += 1u) {
        sum += exp(logits[base + e] - highest);
    }
//#endif
    for (var j = 0u; j < params.top_k; j += 1u) {
        weights[out + j] = params.scale * weights[out + j] / sum;
    }
    for (var j = params.top_k; j < params.weight_stride; j += 1u) {
        weights[out + j] = 0.0;
    }
}
