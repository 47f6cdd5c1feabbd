// How often each expert is chosen, and the sum of its probabilities, over all rows but padding:
//   sums[0, e] = Σ_row, j [ids[row, j] = e] + before[0, e],
//   sums[1, e] = Σ_row exp(logits[row, e] - softmax[row].0) · softmax[row].1 + before[1, e].
//
// logits (rows, experts) float32; ids (rows · top_k); softmax by normalizers.wgsl; sums (2, experts)
// float32 is overwritten, padded with zeros. A workgroup of THREADS invocations for each column of
// sums. Launcher: ops/routing.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= logits.rows
    experts: u32,
    stride: u32, //= logits.stride
    top_k: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read> softmax: array<f32>;
//#if before
@group(0) @binding(4) var<storage, read> before: array<f32>;
//#endif
@group(0) @binding(5) var<storage, read_write> sums: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let expert = group.x;
    var count = 0.0;
    var sum = 0.0;
    if (expert < params.experts) {
        for (var row = local.x; row < params.rows; row += THREADS) {
            let scale = softmax[2u * row + 1u];
            if (scale != 0.0) {
                sum += exp(logits[row * params.stride + expert] - softmax[2u * row]) * scale;
                for (var j = row * params.top_k; j < (row + 1u) * params.top_k; j += 1u) {
                    count += select(0.0, 1.0, ids[j] == expert);
                }
            }
        }
    }
    let chosen = reduce_sum(count, local.x);
    let probability = reduce_sum(sum, local.x);
    if (local.x == 0u) {
//#if before
        sums[expert] = before[expert] + chosen;
        sums[params.stride + expert] = before[params.stride + expert] + probability;
//#else
        sums[expert] = chosen;
        sums[params.stride + expert] = probability;
//#endif
    }
}
