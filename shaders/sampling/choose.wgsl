// chosen[m] = the next token of text m, by its logits; NONE where one of them is not finite.
//
// Logits of tokens that the text has are first divided by the penalty, or multiplied if negative. With
// inverse = 0 the likeliest is taken, the first of equals. Else, with x the logits below the largest
// times inverse, those stay that are no less than the top_k-th of them, that are no less than the
// last of the likeliest that together have top_p of what stays then, and that have min_p of the
// largest's probability; of them that with the largest x - log(e) is taken, where e is exponential by
// a hash of (seed, step, token): it has the probability exp(x) / Σ exp(x).
//
// logits (rows, vocab) float32, changed; choices[m], places[m] of each row; seen (texts, words) has a
// bit for each token that a text has, and gets the chosen one's. THREADS invocations share a row.
// Launcher: ops/sampling.py.
//#include common/row_reduce.wgsl
//#include common/mix_bits.wgsl
//#include common/log.wgsl

struct Params {
    vocab: u32,
    stride: u32,
    words: u32,
}

struct Choice {
    inverse: f32,
    top_p: f32,
    log_min_p: f32,
    penalty: f32,
    top_k: u32,
    step: u32,
    seed: u32,
    seed_high: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> logits: array<f32>;
@group(0) @binding(2) var<storage, read> choices: array<Choice>;
@group(0) @binding(3) var<storage, read> places: array<u32>;
@group(0) @binding(4) var<storage, read_write> seen: array<u32>;
@group(0) @binding(5) var<storage, read_write> chosen: array<u32>;

const NONE = 0xffffffffu;

// As large an integer as its number, among those of others.
fn key_of(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

// An exponential number by a hash, exact near zero, where the least of many are.
fn exponential(hash: u32) -> f32 {
    let v = (f32(hash) + 0.5) * 2.3283064e-10;
    let near = v * (1.0 + v * (0.5 + v * (0.33333334 + v * 0.25)));
    return select(-accurate_log(max(1.0 - v, 2.9802322e-8)), near, v < 0.015625);
}

// How many, or with what weight together, are no less than a key and than the least that stays.
fn share(base: u32, thread: u32, key: u32, least: u32, highest: f32, inverse: f32) -> f32 {
    var sum = 0.0;
    // Four at a time: software GPUs end a shader's loops after 65,535 turns of all together.
    for (var first = thread; first < params.vocab; first += 4u * THREADS) {
        //#unroll e 4
            let i_$e = first + $eu * THREADS;
            let x_$e = logits[base + min(i_$e, params.vocab - 1u)];
            let own_$e = key_of(x_$e);
            let weight_$e = select(exp((x_$e - highest) * inverse), 1.0, inverse == 0.0);
            sum += select(0.0, weight_$e, i_$e < params.vocab && own_$e >= key && own_$e >= least);
        //#end
    }
    return reduce_sum(sum, thread);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let m = place.x;
    let choice = choices[m];
    let base = m * params.stride;
    let thread = local.x;
    let seen_at = places[m] * params.words;
    var wrong = 0.0;
    var highest = -3.4e38;
    for (var i = thread; i < params.vocab; i += THREADS) {
        var x = logits[base + i];
        let bits = bitcast<u32>(x);
        wrong = select(wrong, 1.0, (bits & 0x7f800000u) == 0x7f800000u);
        let is_seen = ((seen[seen_at + i / 32u] >> (i % 32u)) & 1u) != 0u && choice.penalty != 1.0;
        x = select(x, select(x / choice.penalty, x * choice.penalty, x < 0.0), is_seen);
        logits[base + i] = x;
        highest = max(highest, x);
    }
    wrong = reduce_max(wrong, thread);
    highest = reduce_max(highest, thread);
    var least = 0u;
    if (choice.inverse > 0.0 && choice.top_k > 0u && choice.top_k < params.vocab) {
        var found = 0u;
        for (var bit = 0u; bit < 32u; bit += 1u) {
            let next = found | (0x80000000u >> bit);
            let count = share(base, thread, next, 0u, highest, 0.0);
            found = select(found, next, count >= f32(choice.top_k));
        }
        least = found;
    }
    if (choice.inverse > 0.0 && choice.top_p < 1.0) {
        let goal = choice.top_p * share(base, thread, least, least, highest, choice.inverse);
        var found = 0u;
        for (var bit = 0u; bit < 32u; bit += 1u) {
            let next = found | (0x80000000u >> bit);
            let weight = share(base, thread, next, least, highest, choice.inverse);
            found = select(found, next, weight >= goal);
        }
        least = max(least, found);
    }
    let text = mix_bits(mix_bits(choice.seed ^ mix_bits(choice.seed_high)) + choice.step);
    var best = -3.4e38;
    var own_token = 0u;
    for (var i = thread; i < params.vocab; i += THREADS) {
        let x = logits[base + i];
        var score = x;
        if (choice.inverse > 0.0) {
            let scaled = (x - highest) * choice.inverse;
            let stays = key_of(x) >= least && scaled >= choice.log_min_p;
            let noise = accurate_log(exponential(mix_bits(text ^ mix_bits(i * 0x9e3779b9u))));
            score = select(-3.4e38, scaled - noise, stays);
        }
        own_token = select(own_token, i, score > best);
        best = max(best, score);
    }
    let largest = reduce_max(best, thread);
    // The first of those: token numbers are exact as float32 (limits.py).
    let token = u32(-reduce_max(select(-1.6777216e7, -f32(own_token), best == largest), thread));
    if (thread == 0u) {
        chosen[m] = select(token, NONE, wrong > 0.0);
        if (token < params.vocab) {
            seen[seen_at + token / 32u] |= 1u << (token % 32u);
        }
    }
}
