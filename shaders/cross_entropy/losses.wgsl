// losses[i] = (log Σ_c exp(logits[i, c]) - logits[i, target], whether the target's is the largest
// logit, and the first of those that are as large: 1 or 0),  softmax[i] = (max_c, Σ_c exp(· - max_c)),  from what cross_entropy/sums.wgsl found in each block of the vocabulary,
// for the rows from `first` on, up to `count`, of the batch_info[0] that there are.
// With OBJECTIVE the target has the share 1 - smoothing and all tokens share the rest, and
// z_loss · (log Σ exp)² is added; the sum in `softmax` is divided by the slope of that. With ENTROPY
// the second number is the entropy -Σ_c p·log p of the row's distribution p, which is not negative.
//
// An invocation has a row. Launcher: ops/loss.py.
//#include common/flat.wgsl
//#include common/log.wgsl

struct Params {
    count: u32,
    first: u32,
    blocks: u32,
    vocab: u32,
    smoothing: f32,
    z_loss: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partials: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read_write> losses: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read_write> softmax: array<f32>;

fn each(i: u32) {
    let row = params.first + i;
    if (i >= params.count || row >= batch_info[0]) {
        return;
    }
    let base = row * params.blocks;
    var top = -2.0e38;
    for (var block = 0u; block < params.blocks; block += 1u) {
        top = max(top, partials[base + block].x);
    }
    var sums = vec3<f32>(0.0);
    var is_first = true;
//#if ENTROPY?
    var moment = 0.0; // Σ exp(d)·d of the distances d from the largest logit of all blocks
//#endif
    for (var block = 0u; block < params.blocks; block += 1u) {
        let part = partials[base + block];
        sums += vec3<f32>(abs(part.y) * exp(part.x - top), part.z, part.w);
        is_first = is_first && !(part.x == top && part.y < 0.0);
//#if ENTROPY?
        moment += exp(part.x - top) * (part.z + abs(part.y) * (part.x - top));
//#endif
    }
    let beyond = accurate_log(sums.x);
    let hit = select(0.0, 1.0, sums.z == top && is_first);
//#if OBJECTIVE
    let lse = top + beyond;
    let mean = sums.y / f32(params.vocab);
    let loss = top - mix(sums.z, mean, params.smoothing) + beyond;
    losses[row] = vec2<f32>(loss + params.z_loss * lse * lse, hit);
    softmax[2u * row + 1u] = sums.x / (1.0 + 2.0 * params.z_loss * lse);
//#else
    // Of a token that is almost certain all but the logarithm cancels first.
//#if ENTROPY?
    losses[row] = vec2<f32>(top - sums.z + beyond, max(beyond - moment / sums.x, 0.0));
//#else
    losses[row] = vec2<f32>(top - sums.z + beyond, hit);
//#endif
    softmax[2u * row + 1u] = sums.x;
//#endif
    softmax[2u * row] = top;
}
