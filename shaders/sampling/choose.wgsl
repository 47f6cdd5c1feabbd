// chosen[m] = the next token of text m, by its logits; NONE where one of them is not finite.
//
// First the text's biases are added to the logits of their tokens, then logits of tokens that the text
// has are divided by the penalty, or multiplied if negative. With
// inverse = 0 the likeliest is taken, the first of equals. Else, with x the logits below the largest
// times inverse, those stay that are no less than the top_k-th of them, that are no less than the
// last of the likeliest that together have top_p of what stays then, and that have min_p of the
// largest's probability; of them that with the largest x - log(e) is taken, where e is exponential by
// a hash of (seed, step, token): it has the probability exp(x) / Σ exp(x).
//
// logits (rows, vocab) float32, changed; choices[m] of each row; seen (texts, words) has a bit for each
// token that a text has, and gets the chosen one's; then the number of its biases, and of each the token,
// below vocab, and the bias. inputs are a batch's, places of which say the text
// of each row. With NEXT each row is a new token, and its place and step are counted from position p:
// chosen[p % AHEAD, m] gets the token, and the batch becomes that of the token after it, at p + 1 or
// where the capacity ends; so do positions for RoPE that differ, `rotated`. THREADS invocations share a row. Launcher: ops/sampling.py.
//#include common/row_reduce.wgsl
//#include common/mix_bits.wgsl
//#include common/log.wgsl

struct Params {
    vocab: u32,
    stride: u32,
    words: u32,
    rows: u32, //= logits.rows
    ids_at: u32,
    positions_at: u32,
    places_at: u32,
    capacity: u32,
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
@group(0) @binding(1) var<storage, read_write> logits: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> choices: array<Choice>;
@group(0) @binding(3) var<storage, read_write> inputs: array<u32>;
@group(0) @binding(4) var<storage, read_write> seen: array<u32>;
@group(0) @binding(5) var<storage, read_write> chosen: array<u32>;
//#if rotated
@group(0) @binding(6) var<storage, read_write> rotated: array<u32>;
//#endif

const NONE = 0xffffffffu;
const LOWEST = -3.4e38;

// Whether a quad of logits has one that is not finite, by bits as they were loaded: drivers that compile
// with fast math take it that what is computed always is.
fn has_wrong(loaded: vec4<f32>, quad: u32) -> bool {
    let token = vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
    let exponents = bitcast<vec4<u32>>(loaded) & vec4<u32>(0x7f800000u);
    return any((exponents == vec4<u32>(0x7f800000u)) & (token < vec4<u32>(params.vocab)));
}

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

// A quad of logits, the lowest number instead of those past the end.
fn quad_of(loaded: vec4<f32>, quad: u32) -> vec4<f32> {
    let token = vec4<u32>(4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<f32>(LOWEST), loaded, token < vec4<u32>(params.vocab));
}

// How many, or with what weight together, are no less than a key and than the least that stays.
fn share(base: u32, thread: u32, key: u32, least: u32, highest: f32, inverse: f32) -> f32 {
    var sum = 0.0;
    for (var quad = thread; quad < (params.vocab + 3u) / 4u; quad += THREADS) {
        let x = quad_of(logits[base + quad], quad);
        //#unroll e 4
            let own_$e = key_of(x[$e]);
            let weight_$e = select(exp((x[$e] - highest) * inverse), 1.0, inverse == 0.0);
            sum += select(0.0, weight_$e, own_$e >= key && own_$e >= least && 4u * quad + $eu < params.vocab);
        //#end
    }
    return reduce_sum(sum, thread);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let m = place.x;
    let choice = choices[m];
    let base = m * (params.stride / 4u);
    let thread = local.x;
    let quads = (params.vocab + 3u) / 4u;
    let seen_at = inputs[params.places_at + m] * params.words;
//#if NEXT
    let position = inputs[params.positions_at + m];
//#else
    let position = 0u;
//#endif
    // What a choice does not need are loops of no turns: software GPUs compute both sides of an if.
    let sampled = choice.inverse > 0.0;
    let biases_at = seen_at + (params.vocab + 31u) / 32u;
    let biases_end = biases_at + 1u + 2u * seen[biases_at];
    for (var at = biases_at + 1u; at < biases_end; at += 2u) {
        let token = seen[at];
        if (token / 4u % THREADS == thread) {
            let is_own = vec4<u32>(token % 4u) == vec4<u32>(0u, 1u, 2u, 3u);
            logits[base + token / 4u] += select(vec4<f32>(0.0), vec4<f32>(bitcast<f32>(seen[at + 1u])), is_own);
        }
    }
    var wrong = 0.0;
    for (var quad = select(quads, thread, choice.penalty != 1.0); quad < quads; quad += THREADS) {
        let loaded = logits[base + quad];
        let x = quad_of(loaded, quad);
        wrong = select(wrong, 1.0, has_wrong(loaded, quad));
        let bits = seen[seen_at + quad / 8u] >> (4u * (quad % 8u));
        let is_seen = ((vec4<u32>(bits) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u)) != vec4<u32>(0u);
        let less_likely = select(x / choice.penalty, x * choice.penalty, x < vec4<f32>(0.0));
        logits[base + quad] = select(x, clamp(less_likely, vec4<f32>(LOWEST), vec4<f32>(-LOWEST)), is_seen);
    }
    var best = LOWEST;
    var own_token = 0u;
    for (var quad = thread; quad < quads; quad += THREADS) {
        let loaded = logits[base + quad];
        let x = quad_of(loaded, quad);
        wrong = select(wrong, 1.0, has_wrong(loaded, quad));
        //#unroll e 4
            own_token = select(own_token, 4u * quad + $eu, x[$e] > best);
            best = max(best, x[$e]);
        //#end
    }
    wrong = reduce_max(wrong, thread);
    let highest = reduce_max(best, thread);
    var least = 0u;
    var found = 0u;
    let by_count = sampled && choice.top_k > 0u && choice.top_k < params.vocab;
    for (var bit = select(32u, 0u, by_count); bit < 32u; bit += 1u) {
        let next = found | (0x80000000u >> bit);
        let count = share(base, thread, next, 0u, highest, 0.0);
        found = select(found, next, count >= f32(choice.top_k));
    }
    least = found;
    found = 0u;
    var goal = 0.0;
    // The first turn, of the least key, is for the weight of all.
    for (var bit = select(33u, 0u, sampled && choice.top_p < 1.0); bit < 33u; bit += 1u) {
        let next = select(found | (0x80000000u >> (max(bit, 1u) - 1u)), least, bit == 0u);
        let weight = share(base, thread, next, least, highest, choice.inverse);
        found = select(found, next, weight >= goal && bit > 0u);
        goal = select(goal, choice.top_p * weight, bit == 0u);
    }
    least = max(least, found);
    let text = mix_bits(mix_bits(choice.seed ^ mix_bits(choice.seed_high)) + choice.step + position);
    best = select(best, LOWEST, sampled);
    own_token = select(own_token, 0u, sampled);
    for (var quad = select(quads, thread, sampled); quad < quads; quad += THREADS) {
        let x = quad_of(logits[base + quad], quad);
        //#unroll e 4
            let token_$e = 4u * quad + $eu;
            let scaled_$e = (x[$e] - highest) * choice.inverse;
            let stays_$e = key_of(x[$e]) >= least && scaled_$e >= choice.log_min_p && token_$e < params.vocab;
            let noise_$e = accurate_log(exponential(mix_bits(text ^ mix_bits(token_$e * 0x9e3779b9u))));
            let score_$e = select(LOWEST, scaled_$e - noise_$e, stays_$e);
            own_token = select(own_token, token_$e, score_$e > best);
            best = max(best, score_$e);
        //#end
    }
    let largest = reduce_max(best, thread);
    // The first of those: token numbers are exact as float32 (limits.py).
    let token = u32(-reduce_max(select(-1.6777216e7, -f32(own_token), best == largest), thread));
//#if !SUBGROUP
    // All have read what the first overwrites.
    storageBarrier();
//#endif
    if (thread == 0u) {
//#if NEXT
        chosen[position % AHEAD * params.rows + m] = select(token, NONE, wrong > 0.0);
        inputs[params.ids_at + m] = min(token, params.vocab - 1u);
        inputs[params.positions_at + m] = min(position + 1u, params.capacity);
//#if rotated
        rotated[m] = min(rotated[m] + 1u, params.capacity);
//#endif
//#else
        chosen[m] = select(token, NONE, wrong > 0.0);
//#endif
        if (token < params.vocab) {
            seen[seen_at + token / 32u] |= 1u << (token % 32u);
        }
    }
}
