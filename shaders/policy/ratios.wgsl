// ratios[s] = (Σ (log p - old log p), Σ KL) / labels, over the label rows of sample s: the logarithm
// of the length-normalized ratio of the sample's probabilities (GSPO, arXiv 2507.18071), and the mean
// of its divergences from the reference. With SUMMED the logarithm of the ratio itself, Σ (log p - old
// log p), and the number of labels. With ON_POLICY the logarithm is 0. With a threshold the third number is
// the share of the labels whose entropy reaches the threshold.
//
// THREADS invocations share a sample. Launcher: ops/policy.py.
//#include common/row_reduce.wgsl

@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> samples: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read> completions: array<vec4<f32>>;
//#if threshold
@group(0) @binding(5) var<storage, read_write> ratios: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> threshold: array<f32>;
//#else
@group(0) @binding(5) var<storage, read_write> ratios: array<vec2<f32>>;
//#endif

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let sample = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end has no rows.
    var span = vec2<u32>(0u);
    if (sample < batch_info[3]) {
        span = samples[sample].xy;
    }
    var sum = 0.0;
    var divergence = 0.0;
//#if threshold
    var kept = 0.0;
//#endif
    for (var i = span.x + local.x; i < span.y; i += THREADS) {
        let apart = completions[i].y + losses[i].x;
//#if !ON_POLICY
        sum -= losses[i].x + completions[i].x;
//#endif
        divergence += exp(apart) - apart - 1.0;
//#if threshold
        kept += select(0.0, 1.0, losses[i].y >= threshold[0]);
//#endif
    }
    sum = reduce_sum(sum, local.x);
    divergence = reduce_sum(divergence, local.x);
//#if threshold
    kept = reduce_sum(kept, local.x);
//#endif
    if (local.x == 0u && sample < batch_info[3]) {
        let count = f32(max(span.y - span.x, 1u));
//#if SUMMED
        ratios[sample] = vec2<f32>(sum, count);
//#else
//#if threshold
        ratios[sample] = vec4<f32>(sum, divergence, kept, 0.0) / count;
//#else
        ratios[sample] = vec2<f32>(sum, divergence) / count;
//#endif
//#endif
    }
}
