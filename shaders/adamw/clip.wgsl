// From the sums of a step: the norm of the mean gradient, and what to multiply sums by so that
// the mean is clipped to max_norm, as torch.nn.utils.clip_grad_norm_ does.
//
// stats[1] = label tokens, read;  stats[2] = norm = √(Σ squares) / tokens;
// stats[3] = min(1, max_norm / (norm + 1e-6)) / tokens, or 0 where there is no token or the
// norm is not finite: then the update is left out. max_norm 0 does not clip.
// One workgroup of THREADS invocations. Launcher: ops/optimizers.py.
//#include common/row_reduce.wgsl

struct Params {
    max_norm: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> squares: array<f32>;
@group(0) @binding(2) var<storage, read_write> stats: array<f32>;

// Drivers that compile with fast math take it that arithmetic never meets NaN or infinity: only
// bits as they were loaded tell.
fn is_finite(i: u32) -> bool {
    return (bitcast<u32>(squares[i]) & 0x7f800000u) != 0x7f800000u;
}

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var own = 0.0;
    var last_wrong = 0.0; // 1 + the place of a sum that is not finite
    for (var i = local.x; i < SUMS; i += THREADS) {
        own += squares[i];
        last_wrong = select(f32(i + 1u), last_wrong, is_finite(i));
    }
    let sum = reduce_sum(own, local.x);
    let wrong = u32(reduce_max(last_wrong, local.x));
    if (local.x > 0u) {
        return;
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
        if (wrong > 0u) {
            norm = squares[wrong - 1u];
        }
    }
    // Finite parts may add up to infinity.
    if (wrong > 0u || sum > 3.4e38) {
        factor = 0.0;
    }
    stats[2] = norm;
    stats[3] = factor;
}
