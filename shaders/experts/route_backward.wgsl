// The gradient of the router's logits from that of the weights w of the chosen experts:
//   dlogits[e] = p[e] · (d[e] - unscale · Σ_j w_j · d_j),  d[e] = dweights[j] where e is the j-th
// chosen, else 0, unscale = 1 / scale, and p = scale times the softmax of the logits over all
// experts; or (NORMALIZED) over the chosen ones, whose p are w, and 0 for the others.
//
// dlogits (rows, experts) float32 is overwritten, padded with zeros. Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= dlogits.rows
    experts: u32,
    logit_stride: u32, //= dlogits.stride
    top_k: u32,
    weight_stride: u32, //= weights.stride
    scale: f32,
    unscale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if !NORMALIZED
@group(0) @binding(1) var<storage, read> logits: array<f32>;
//#endif
@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read> weights: array<f32>;
//#input 4 dweights: 1
@group(0) @binding(5) var<storage, read_write> dlogits: array<f32>;

fn each(row: u32) {
    if (row >= params.rows) {
        return;
    }
    let base = row * params.logit_stride;
    let at = row * params.weight_stride;
    var mean = 0.0;
    for (var j = 0u; j < params.top_k; j += 1u) {
        mean += weights[at + j] * load_dweights(at + j);
    }
    mean *= params.unscale;
//#if NORMALIZED
    for (var e = 0u; e < params.logit_stride; e += 1u) {
        dlogits[base + e] = 0.0;
    }
//#else
    // The first chosen has the largest logit and the weight exp(0) / sum.
    let highest = logits[base + ids[row * params.top_k]];
    let scale = weights[at];
    for (var e = 0u; e < params.logit_stride; e += 1u) {
        let p = scale * exp(logits[base + e] - highest);
        dlogits[base + e] = select(0.0, -p * mean, e < params.experts);
    }
//#endif
    for (var j = 0u; j < params.top_k; j += 1u) {
//#if NORMALIZED
        dlogits[base + ids[row * params.top_k + j]] = weights[at + j] * (load_dweights(at + j) - mean);
//#else
        dlogits[base + ids[row * params.top_k + j]] += weights[at + j] * load_dweights(at + j);
//#endif
    }
}
