//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/forward.wgsl on matrix units. Sums of which each row has a factor of its own are out of
// reach there: a first round over the keys finds the logarithms of the softmaxes' sums, and a second
// one has the weights as they stay. Launcher: kernels/attention/matrix_tiles.py.
//
// What is beyond f16 is held at 65,504 and counted in `saturated`, each value once.
//#include common/attention.wgsl
//#include common/attention_matrix.wgsl
//#include common/attention_masks.wgsl
//#include common/attention_sinks.wgsl
//#include common/attention_softmax.wgsl
//#include common/log.wgsl
//#input 1 q: 8
//#input 2 k: 8
//#input 3 v: 8
//#output 5 o: 8
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;
//#if saturated
@group(0) @binding(15) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif

var<private> q_at: u32;
var<private> kv_at: u32;
var<private> lse_at: u32;
var<private> own_first: u32;
var<private> counts: bool; // of keys and values
var<private> beyond: u32;

//#unroll i OCTETS: var<private> segment_$i: u32; var<private> highest_$i: f32; var<private> sum_$i: f32;

fn own_0(row: u32, unit: u32) -> Eight {
    let v = load_q(q_at + min(row, params.seq - 1u) * params.q_stride + unit);
//#if saturated
    if (row < params.seq) { beyond += beyond8(v); }
//#endif
    return v;
}

fn other_raw_0(turn: Turn, row: u32, unit: u32) -> Raw_k {
    return raw_k(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn other_raw_1(turn: Turn, row: u32, unit: u32) -> Raw_v {
    return raw_v(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}
//#if saturated

// The block's own keys and values, in the second round.
fn count_own(turn: Turn, row: u32, v: Eight) {
    if (counts && turn.round == 1u && row >= own_first && row < min(own_first + BLOCK, params.seq)) {
        beyond += beyond8(v);
    }
}
//#endif

fn other_0(turn: Turn, row: u32, raw: Raw_k) -> Eight {
    let v = unpack_k(raw);
//#if saturated
    count_own(turn, row, v);
//#endif
    return v;
}

fn other_1(turn: Turn, row: u32, raw: Raw_v) -> Eight {
    let v = unpack_v(raw);
//#if saturated
    count_own(turn, row, v);
//#endif
    return v;
}

fn info_of(i: u32, turn: Turn) -> vec4<u32> {
    return segments_of(turn.row0, turn.other + i % INFO_FOURS * 4u);
}

fn after(turn: Turn) -> Turn {
    var next = turn;
    next.other += OTHERS;
    if (next.other >= turn.end) {
        next.other = turn.begin;
        next.round += 1u;
    }
    return next;
}

fn weights_of_scores(s: vec4<f32>, row_lse: f32) -> vec4<f32> {
    let below = s - vec4<f32>(row_lse);
    let is_above = bitcast<vec4<u32>>(below) - vec4<u32>(1u) < vec4<u32>(0x7f800000u); // as not_above_zero
    return WEIGHT_SCALE * exp(select(below, vec4<f32>(0.0), is_above));
}

// Adds eight scores to the row's sum, which has its highest so far as its unit.
fn add_up(highest: f32, sum: f32, lower: vec4<f32>, upper: vec4<f32>) -> vec2<f32> {
    let both = max(lower, upper);
    let next = max(highest, max(max(both.x, both.y), max(both.z, both.w)));
    let terms = exp(lower - vec4<f32>(next)) + exp(upper - vec4<f32>(next));
    return vec2<f32>(next, sum * exp(highest - next) + dot(terms, vec4<f32>(1.0)));
}

fn weigh(index: u32, turn: Turn, info_at: u32) {
    let last = min(own_first + BLOCK, params.seq) - 1u;
    let near = turn.other + OTHERS - 1u <= own_first && last - turn.other < params.window;
    //#unroll i OCTETS
    {
        let row = (index + $iu * THREADS) / SCORE_UNITS;
        let unit = (index + $iu * THREADS) % SCORE_UNITS;
        if (OCTETS * THREADS == BLOCK * SCORE_UNITS || row < BLOCK) {
            let at = SCORES_AT + row * SCORE_STRIDE + 2u * unit;
            let lower_segments = memory[info_at + 2u * unit];
            let upper_segments = memory[info_at + 2u * unit + 1u];
            let own = vec4<u32>(segment_$i);
            var lower = scores_of(floats(at));
            var upper = scores_of(floats(at + 1u));
            if (!near || segment_$i == 0u || any(lower_segments != own) || any(upper_segments != own)) {
                let query = vec4<u32>(own_first + row);
                let key = turn.other + 8u * unit;
                lower = select(vec4<f32>(HIDDEN), lower, sees(query, four_from(key), own, lower_segments));
                upper = select(vec4<f32>(HIDDEN), upper, sees(query, four_from(key + 4u), own, upper_segments));
            }
            if (turn.round == 0u) {
                let added = add_up(highest_$i, sum_$i, lower, upper);
                highest_$i = added.x;
                sum_$i = added.y;
            } else {
                put_weights(at, unit, weights_of_scores(lower, sum_$i), weights_of_scores(upper, sum_$i));
            }
        }
    }
    //#end
}

// sum_I becomes the row's log-sum-exp.
fn finish_sums(index: u32) {
    //#unroll i OCTETS
        let row_$i = (index + $iu * THREADS) / SCORE_UNITS;
        let unit_$i = (index + $iu * THREADS) % SCORE_UNITS;
        if (row_$i < BLOCK) {
            memory[SCORES_AT + row_$i * SCORE_STRIDE + unit_$i] = bitcast<vec4<u32>>(vec4<f32>(highest_$i, sum_$i, 0.0, 0.0));
        }
    //#end
    workgroupBarrier();
    //#unroll i OCTETS
        if (row_$i < BLOCK) {
            sum_$i = sum_of_row(SCORES_AT + row_$i * SCORE_STRIDE);
            let query = own_first + row_$i;
            if (unit_$i == 0u && query < params.seq && lse_at != NOWHERE) {
                lse[lse_at + query * params.heads] = sum_$i;
            }
        }
    //#end
}

const NOWHERE = 0xffffffffu;

fn sum_of_row(at: u32) -> f32 {
    var highest = LEAST;
    for (var i = 0u; i < SCORE_UNITS; i += 1u) {
        highest = max(highest, floats(at + i).x);
    }
    var sum = 0.0;
    for (var i = 0u; i < SCORE_UNITS; i += 1u) {
        let part = floats(at + i);
        sum += part.y * exp(part.x - highest);
    }
    // NaN stays NaN, told by its bits.
    let bits = bitcast<u32>(sum);
    return select(select(sum, highest + accurate_log(sum), bits <= 0x7f800000u), 2.0e38, bits == 0u);
}

fn put_0(row: u32, unit: u32, value: Eight) {
    store_o(q_at + row * params.q_stride + unit, scale8(value, 1.0 / WEIGHT_SCALE));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    // The last queries see the most keys: they begin first.
    let block = (params.seq + BLOCK - 1u) / BLOCK - 1u - group.x / SPANS;
    let span = group.x % SPANS;
    let first = block * BLOCK;
    let row0 = group.z * params.seq;
    own_first = first;
    q_at = row0 * params.q_stride + group.y * UNITS;
    kv_at = row0 * params.kv_stride + group.y / params.group * UNITS;
    lse_at = select(NOWHERE, row0 * params.heads + group.y, span == 0u);
    counts = group.y % params.group == 0u;
    //#unroll i OCTETS: segment_$i = segments[row0 + min(first + (index + $iu * THREADS) / SCORE_UNITS, params.seq - 1u)];
    // All units of a row know of the sink, and one counts it.
    //#unroll i OCTETS: highest_$i = first_highest(group.y, LEAST); sum_$i = select(0.0, FIRST_SUM, (index + $iu * THREADS) % SCORE_UNITS == 0u);
    let keys = keys_of_block(row0, first);
    attend(index, subgroup, first, span, Turn(keys.begin, keys.begin, keys.end, 0u, 2u, row0, 0u));
//#if saturated
    if (span == 0u && beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
}
