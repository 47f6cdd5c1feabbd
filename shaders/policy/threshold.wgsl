// threshold[0] = the entropy from which on a label row has a policy loss: the smallest one that is not below
// the quantile of all rows' entropies, losses[i].y, interpolated as torch.quantile does. That is element
// ceil(quantile · (rows - 1)) of the ascending entropies.
//
// Entropies are not negative, so that they are ordered as their bits are, which are found one by one from
// the highest. One workgroup of THREADS invocations. Launcher: ops/policy.py.
//#include common/row_reduce.wgsl

struct Params {
    quantile: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read_write> threshold: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    let rows = batch_info[0];
    let rank = ceil(params.quantile * f32(max(rows, 1u) - 1u));
    var bits = 0u;
    for (var step = 0u; step < 31u; step += 1u) {
        let tried = bits | (1u << (30u - step));
        var below = 0.0;
        for (var i = local.x; i < rows; i += THREADS) {
            below += select(0.0, 1.0, bitcast<u32>(losses[i].y) < tried);
        }
        if (reduce_sum(below, local.x) <= rank) {
            bits = tried;
        }
    }
    if (local.x == 0u) {
        threshold[0] = bitcast<f32>(bits);
    }
}
