// From the sums of a step: the norm of the mean gradient, and what to multiply sums by so that
// the mean is clipped to max_norm, as torch.nn.utils.clip_grad_norm_ does.
//
// stats[1] = label tokens, read;  stats[2] = norm = √(Σ partial) / tokens;
// stats[3] = min(1, max_norm / (norm + 1e-6)) / tokens, or 0 where there is no token or the
// norm is not finite: then the update is left out. max_norm 0 does not clip. Launcher: ops/adamw.py.

struct Params {
    max_norm: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> partial: array<f32>;
@group(0) @binding(2) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(1)
fn main() {
    var sum = 0.0;
    for (var i = 0u; i < PARTIALS; i += 1u) {
        sum += partial[i];
    }
    let tokens = stats[1];
    var norm = 0.0;
    var factor = 0.0;
    if (tokens > 0.0) {
        norm = sqrt(sum) / tokens;
        factor = 1.0 / tokens;
        if (params.max_norm > 0.0) {
            factor *= min(1.0, params.max_norm / (norm + 1.0e-6));
        }
    }
    // Comparisons with NaN are not to be trusted on every driver; its bits are.
    if ((bitcast<u32>(norm) & 0x7f800000u) == 0x7f800000u) {
        factor = 0.0;
    }
    stats[2] = norm;
    stats[3] = factor;
}
