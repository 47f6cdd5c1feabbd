// The gradient of the router's logits from that of the sums of probabilities p, d = dsums[1]:
//   dlogits[row, e] = p[row, e] · (d[e] - Σ_k p[row, k] · d[k]),
// zero for rows of padding, whose p are zero in softmax.
//
// logits, dlogits (rows, experts) float32, dlogits overwritten, padded with zeros; softmax by
// normalizers.wgsl. Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= logits.rows
    experts: u32,
    stride: u32, //= logits.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
@group(0) @binding(2) var<storage, read> softmax: array<f32>;
//#input 3 dsums: 1
@group(0) @binding(4) var<storage, read_write> dlogits: array<f32>;

fn each(row: u32) {
    if (row >= params.rows) {
        return;
    }
    let base = row * params.stride;
    let highest = softmax[2u * row];
    let scale = softmax[2u * row + 1u];
    var mean = 0.0;
    for (var e = 0u; e < params.experts; e += 1u) {
        mean += exp(logits[base + e] - highest) * scale * load_dsums(params.stride + e);
    }
    for (var e = 0u; e < params.stride; e += 1u) {
        let p = exp(logits[base + e] - highest) * scale;
        let d = p * (load_dsums(params.stride + e) - mean);
        dlogits[base + e] = select(0.0, d, e < params.experts);
    }
}
