// The loss of sequences with labels, as in transformers' ForSequenceClassification:
//   SINGLE   weight[y] · -log softmax(z)[y], for the class y = targets[i]
//   MULTI    the mean over the classes of -t log σ(z) - (1 - t) log σ(-z)
//   neither  regression, the mean over the classes of (z - t)²
//
// scores z (rows · classes), targets t (rows · width), class_weights (classes) float32; the first
// batch_info[0] rows are sequences. dscores (rows · classes) overwritten, zero for the others.
// stats[0] += Σ losses,  stats[1] += Σ weights,  stats[8 …] += the sums that ops/score.py names.
// One workgroup of THREADS invocations. Launcher: ops/score.py.
//#include common/row_reduce.wgsl
//#include common/preference.wgsl

struct Params {
    rows: u32,
    classes: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> scores: array<f32>;
@group(0) @binding(2) var<storage, read> targets: array<f32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> dscores: array<f32>;
@group(0) @binding(5) var<storage, read_write> stats: array<f32>;
//#input 6 class_weights?: 1 float32

// A row's loss, its weight, whether it is a hit, and its absolute error.
//#if SINGLE
fn loss_of(row: u32) -> vec4<f32> {
    let base = row * params.classes;
    var best = 0u;
    var top = scores[base];
    for (var c = 1u; c < params.classes; c += 1u) {
        let z = scores[base + c];
        if (z > top) {
            best = c;
            top = z;
        }
    }
    var sum = 0.0;
    for (var c = 0u; c < params.classes; c += 1u) {
        sum += exp(scores[base + c] - top);
    }
    let label = u32(targets[row]);
    var weight = 1.0;
//#if class_weights
    weight = load_class_weights(label);
//#endif
    for (var c = 0u; c < params.classes; c += 1u) {
        let p = exp(scores[base + c] - top) / sum;
        dscores[base + c] = weight * (p - select(0.0, 1.0, c == label));
    }
    let loss = top - scores[base + label] + accurate_log(sum);
    return vec4<f32>(weight * loss, weight, select(0.0, 1.0, best == label), 0.0);
}
//#else
fn loss_of(row: u32) -> vec4<f32> {
    let base = row * params.classes;
    let share = 1.0 / f32(params.classes);
    var loss = 0.0;
    var hit = 1.0;
    var error = 0.0;
    for (var c = 0u; c < params.classes; c += 1u) {
        let z = scores[base + c];
        let t = targets[base + c];
//#if MULTI
        loss -= t * log_logistic(z) + (1.0 - t) * log_logistic(-z);
        dscores[base + c] = share * (logistic(z) - t);
        hit *= select(0.0, 1.0, (z > 0.0) == (t > 0.5));
//#else
        let apart = z - t;
        loss += apart * apart;
        dscores[base + c] = 2.0 * share * apart;
        error += abs(apart);
        hit = 0.0;
//#endif
    }
    return vec4<f32>(share * loss, 1.0, hit, share * error);
}
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var sums = vec4<f32>(0.0);
    for (var row = local.x; row < params.rows; row += THREADS) {
        if (row < batch_info[0]) {
            sums += loss_of(row);
        } else {
            for (var c = 0u; c < params.classes; c += 1u) {
                dscores[row * params.classes + c] = 0.0;
            }
        }
    }
    let loss = reduce_sum(sums.x, local.x);
    let weight = reduce_sum(sums.y, local.x);
    let hits = reduce_sum(sums.z, local.x);
    let errors = reduce_sum(sums.w, local.x);
    if (local.x > 0u) {
        return;
    }
    stats[0] += loss;
    stats[1] += weight;
    stats[8] += f32(batch_info[0]);
    stats[9] += hits;
    stats[10] += errors;
}
