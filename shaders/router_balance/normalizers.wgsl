// What makes probabilities of a row's router logits: softmax[row] = (largest logit, 1 / Σ exp below
// it), the second zero for a row of padding (segment 0), which then counts nowhere.
//
// logits (rows, experts) float32; softmax (2 · rows) is overwritten. Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= logits.rows
    experts: u32,
    stride: u32, //= logits.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> segments: array<u32>;
@group(0) @binding(3) var<storage, read_write> softmax: array<f32>;

fn each(row: u32) {
    if (row >= params.rows) {
        return;
    }
    let base = row * params.stride;
    var highest = logits[base];
    for (var e = 1u; e < params.experts; e += 1u) {
        highest = max(highest, logits[base + e]);
    }
    var sum = 0.0;
    for (var e = 0u; e < params.experts; e += 1u) {
        sum += exp(logits[base + e] - highest);
    }
    softmax[2u * row] = highest;
    softmax[2u * row + 1u] = select(0.0, 1.0 / sum, segments[row] != 0u);
}
