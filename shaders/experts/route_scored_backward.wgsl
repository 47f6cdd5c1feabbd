// The gradient of the router's logits from that of the weights that route_scored.wgsl made of them:
//   ds[j] = scale · (dweights[j] - m) / D of the j-th chosen, D what weights are divided by and
//   m = Σ_k dweights[k] · s[k] / D where D grows with the sum (NORMALIZED), else 0;
//   dlogits[e] = ds · s · (1 - s) (SIGMOID), or s[e] · (ds[e] - Σ_k s[k] · ds[k]); ds is 0 for those
//   that are not chosen.
//
// dlogits (rows, experts) float32 is overwritten, padded with zeros. Launcher: ops/routing.py.
//#include common/flat.wgsl
//#include common/expert_scores.wgsl

struct Params {
    rows: u32, //= logits.rows
    experts: u32,
    logit_stride: u32, //= logits.stride
    top_k: u32,
    weight_stride: u32, //= dweights.stride
    least: f32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> ids: array<u32>;
//#input 3 dweights: 1
@group(0) @binding(4) var<storage, read_write> dlogits: array<f32>;

fn each(row: u32) {
    if (row >= params.rows) {
        return;
    }
    let base = row * params.logit_stride;
    let at = row * params.weight_stride;
    let softmax = softmax_of(base);
    var total = 0.0;
    var weighted = 0.0;
    for (var j = 0u; j < params.top_k; j += 1u) {
        let score = score_of(logits[base + ids[row * params.top_k + j]], softmax);
        total += score;
        weighted += score * load_dweights(at + j);
    }
    let below = divisor(total);
    var mean = 0.0;
//#if NORMALIZED
    mean = weighted / below;
//#if AT_LEAST
    mean = select(0.0, mean, total > params.least);
//#endif
//#endif
    let factor = params.scale / below;
    // Σ_k s[k] · ds[k]
    let inner = factor * (weighted - mean * total);
    for (var e = 0u; e < params.logit_stride; e += 1u) {
//#if SIGMOID
        dlogits[base + e] = 0.0;
//#else
        let score = score_of(logits[base + e], softmax);
        dlogits[base + e] = select(0.0, -score * inner, e < params.experts);
//#endif
    }
    for (var j = 0u; j < params.top_k; j += 1u) {
        let e = base + ids[row * params.top_k + j];
        let logit = logits[e];
        let dscore = factor * (load_dweights(at + j) - mean);
//#if SIGMOID
        dlogits[e] = dscore * score_of(logit, softmax) * score_of(-logit, softmax);
//#else
        dlogits[e] += dscore * score_of(logit, softmax);
//#endif
    }
}
