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
//#input 1 partial: 4 float32 buffer
@group(0) @binding(2) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(1)
fn main() {
    var sum = 0.0;
    // Drivers that compile with fast math take it that arithmetic never meets NaN or infinity: only
    // bits as they were loaded tell.
    var not_finite = 0u;
    for (var i = 0u; i < PARTIALS / 4u; i += 1u) {
        let bits = bitcast<vec4<u32>>(raw_partial(i));
        //#unroll j 4
        if ((bits[$j] & 0x7f800000u) == 0x7f800000u) {
            not_finite = bits[$j];
        }
        //#end
        let v = load_partial(i);
        sum = sum + v.x + v.y + v.z + v.w;
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
        if (not_finite != 0u) {
            norm = bitcast<f32>(not_finite);
        }
    }
    // Finite parts may add up to infinity.
    if (not_finite != 0u || sum > 3.4e38) {
        factor = 0.0;
    }
    stats[2] = norm;
    stats[3] = factor;
}
