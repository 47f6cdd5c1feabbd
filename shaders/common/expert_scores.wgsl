// Scores of a row's experts from their logits, and what the weights of the chosen are divided by.
// Its user has `logits` and, in `params`, `experts` and `least`.

// A row's largest logit, and the sum of exponentials below it.
struct Softmax {
    highest: f32,
    sum: f32,
}

//#if SIGMOID
fn softmax_of(base: u32) -> Softmax {
    return Softmax(0.0, 1.0);
}

fn score_of(logit: f32, softmax: Softmax) -> f32 {
    return 1.0 / (1.0 + exp(-logit));
}
//#else
fn softmax_of(base: u32) -> Softmax {
    var highest = logits[base];
    for (var e = 1u; e < params.experts; e += 1u) {
        highest = max(highest, logits[base + e]);
    }
    var sum = 0.0;
    for (var e = 0u; e < params.experts; e += 1u) {
        sum += exp(logits[base + e] - highest);
    }
    return Softmax(highest, sum);
}

fn score_of(logit: f32, softmax: Softmax) -> f32 {
    return exp(logit - softmax.highest) / softmax.sum;
}
//#endif

//#if NORMALIZED
fn divisor(total: f32) -> f32 {
//#if AT_LEAST
    return max(total, params.least);
//#else
    return total + params.least;
//#endif
}
//#else
fn divisor(total: f32) -> f32 {
    return 1.0;
}
//#endif
