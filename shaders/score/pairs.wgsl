// Bradley-Terry's loss of pairs of sequences, chosen before rejected, with TRL's margin m and
// centering: -log σ(chosen - rejected - m) + center · (chosen + rejected)².
//
// scores (rows) and targets (rows), whose chosen rows have the margins, float32; the first
// batch_info[0] rows are sequences. dscores (rows) overwritten, zero for the others.
// stats[0] += Σ losses,  stats[1] += pairs,  stats[8 …] += the sums that ops/score.py names.
// One workgroup of THREADS invocations. Launcher: ops/score.py.
//#include common/row_reduce.wgsl
//#include common/preference.wgsl

struct Params {
    rows: u32, //= dscores.columns
    center: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> scores: array<f32>;
@group(0) @binding(2) var<storage, read> targets: array<f32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> dscores: array<f32>;
@group(0) @binding(5) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    let pairs = batch_info[0] / 2u;
    var loss = 0.0;
    var right = 0.0;
    var total = 0.0;
    var margins = 0.0;
    var largest = -2.0e38;
    var negated = -2.0e38; // the smallest reward, with its sign changed
    for (var pair = local.x; 2u * pair < params.rows; pair += THREADS) {
        var slopes = vec2<f32>(0.0);
        if (pair < pairs) {
            let chosen = scores[2u * pair];
            let rejected = scores[2u * pair + 1u];
            let apart = chosen - rejected - targets[2u * pair];
            let both = chosen + rejected;
            let slope = logistic(-apart);
            loss += params.center * both * both - log_logistic(apart);
            slopes = vec2<f32>(-slope, slope) + 2.0 * params.center * both;
            right += select(0.0, 1.0, chosen > rejected);
            total += both;
            margins += chosen - rejected;
            largest = max(largest, max(chosen, rejected));
            negated = max(negated, max(-chosen, -rejected));
        }
        dscores[2u * pair] = slopes.x;
        if (2u * pair + 1u < params.rows) {
            dscores[2u * pair + 1u] = slopes.y;
        }
    }
    loss = reduce_sum(loss, local.x);
    right = reduce_sum(right, local.x);
    total = reduce_sum(total, local.x);
    margins = reduce_sum(margins, local.x);
    largest = reduce_max(largest, local.x);
    negated = reduce_max(negated, local.x);
    if (local.x > 0u || pairs == 0u) {
        return;
    }
    stats[0] += loss;
    stats[1] += f32(pairs);
    stats[8] += f32(pairs);
    stats[9] += right;
    stats[10] += total;
    stats[11] += margins;
    stats[12] += largest;
    stats[13] -= negated;
    stats[14] += 1.0;
}
