//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/forward.wgsl on matrix units. Weights are 2^(score - reference), where scores are to base 2
// and each row has a reference. Rescaling sums is slow, since elements of matrices are only accessible
// through workgroup memory: so a reference stays until a weight would exceed 2^MOST_BITS; then it is
// raised so that the row's highest score has a weight of 2^WEIGHT_BITS, and this turn's weights are
// computed again. Launcher: kernels/attention/matrix_units.py.
//
// What is beyond f16 is held at 65,504 and counted in `saturated`, each value once.
//#include common/attention.wgsl
//#include common/attention_matrix.wgsl
//#include common/attention_matrix_keys.wgsl
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
var<private> lse_at: u32;
var<private> beyond: u32;
var<private> sink_of_head: f32;

// f16 ends at 2^16, and below 2^-14 drivers may take it for zero: those are weights that are 2^-23 of
// the reference's, or less, which 16,384 keys take to add up to half of bfloat16's last place. A growth
// of 2^6 after the first turn is rare.
//#if HALF
const WEIGHT_BITS = 9.0;
//#else
const WEIGHT_BITS = 0.0;
//#endif
const MOST_BITS = WEIGHT_BITS + 6.0;

// Of eight scores of a turn each: the scores, their row's reference, its part of the row's sum without
// this turn's weights, their sum, and the factor of the row's sums when its reference is raised.
//#unroll i OCTETS: var<private> lower_$i: vec4<f32>; var<private> upper_$i: vec4<f32>; var<private> reference_$i: f32; var<private> sum_$i: f32; var<private> added_$i: f32; var<private> factor_$i: f32;

fn own_0(row: u32, unit: u32) -> Kept {
    let v = load_q(q_at + min(row, params.seq - 1u) * params.q_stride + unit);
//#if saturated
    if (row < params.seq) { beyond += beyond8(v); }
//#endif
    return kept8(v);
}

fn after(turn: Turn) -> Turn {
    var next = turn;
    next.other += OTHERS;
    next.round += select(0u, 1u, next.other >= turn.end);
    return next;
}

fn row_of(octet: u32) -> u32 {
    return octet / SCORE_UNITS;
}

// Whether the octet is one, for the workgroup may have more invocations.
fn is_own(octet: u32) -> bool {
    return OCTETS * THREADS == BLOCK * SCORE_UNITS || octet < BLOCK * SCORE_UNITS;
}

fn scores_at(octet: u32) -> u32 {
    return SCORES_AT + row_of(octet) * SCORE_STRIDE + octet % SCORE_UNITS * 2u;
}

fn scores_to_base_2(product: vec4<f32>) -> vec4<f32> {
//#if SOFTCAP
    return scores_of(product) * LOG2_E;
//#else
    return product * (params.scale * LOG2_E);
//#endif
}

fn highest_of(lower: vec4<f32>, upper: vec4<f32>) -> f32 {
    let both = max(lower, upper);
    return max(max(both.x, both.y), max(both.z, both.w));
}

// Weights, where the scores were that they are made of. Returns their sum. Those of a row with NaN
// need not be right, since its sum is NaN.
fn weights_of(octet: u32, lower: vec4<f32>, upper: vec4<f32>) -> f32 {
    let lower_weights = exp2(lower);
    let upper_weights = exp2(upper);
    put_weights(scores_at(octet), octet % SCORE_UNITS, near8(eight(lower_weights, upper_weights)));
    return dot(lower_weights + upper_weights, vec4<f32>(1.0));
}

fn weigh(index: u32, turn: Turn, info_at: u32, is_whole: bool) {
    //#unroll i OCTETS
    {
        let octet = index + $iu * THREADS;
        if (is_own(octet)) {
            let at = scores_at(octet);
            lower_$i = scores_to_base_2(floats(at));
            upper_$i = scores_to_base_2(floats(at + 1u));
            if (!is_whole) {
                let query = own_first + row_of(octet);
                let key = turn.other + octet % SCORE_UNITS * 8u;
                let own = vec4<u32>(segments[turn.row0 + min(query, params.seq - 1u)]);
//#if BLOCKS?
                take_blocks(turn.row0, vec4<u32>(query));
//#endif
                lower_$i = select(vec4<f32>(HIDDEN), lower_$i, sees(vec4<u32>(query), four_from(key), own, segments_of(turn.row0, key)));
                upper_$i = select(vec4<f32>(HIDDEN), upper_$i, sees(vec4<u32>(query), four_from(key + 4u), own, segments_of(turn.row0, key + 4u)));
            }
            let lower = lower_$i - vec4<f32>(reference_$i);
            let upper = upper_$i - vec4<f32>(reference_$i);
            if (highest_of(lower, upper) > MOST_BITS) {
                raised = turn.other + 1u;
                if (reference_$i > LEAST) {
                    grown = turn.other + 1u;
                }
            }
            sum_$i += added_$i;
            added_$i = weights_of(octet, lower, upper);
        }
    }
    //#end
}

// To the others that have a part of the row.
fn tell(octet: u32, value: f32) {
    memory[SCORES_AT + row_of(octet) * SCORE_STRIDE + octet % SCORE_UNITS] = bitcast<vec4<u32>>(vec4<f32>(value));
}

fn told(octet: u32, unit: u32) -> f32 {
    return floats(SCORES_AT + row_of(octet) * SCORE_STRIDE + unit).x;
}

fn tell_highest(index: u32) {
    //#unroll i OCTETS: if (is_own(index + $iu * THREADS)) { tell(index + $iu * THREADS, highest_of(lower_$i, upper_$i)); }
}

// Of all rows, or only of those without weights so far.
fn raise_references(index: u32, is_all: bool) {
    //#unroll i OCTETS
        factor_$i = 1.0;
        if (is_own(index + $iu * THREADS) && (is_all || reference_$i <= LEAST)) {
            var next = reference_$i;
            for (var unit = 0u; unit < SCORE_UNITS; unit += 1u) {
                next = max(next, told(index + $iu * THREADS, unit) - WEIGHT_BITS);
            }
            factor_$i = exp2(reference_$i - next);
            reference_$i = next;
            sum_$i *= factor_$i;
        }
    //#end
}

// Of each row the part that lies where the invocation's scores were.
fn rescale_results(index: u32) {
    //#unroll i OCTETS
        if (is_own(index + $iu * THREADS)) {
            let at = scores_at(index + $iu * THREADS);
            memory[at] = bitcast<vec4<u32>>(floats(at) * factor_$i);
            memory[at + 1u] = bitcast<vec4<u32>>(floats(at + 1u) * factor_$i);
        }
    //#end
}

fn weigh_again(index: u32) {
    //#unroll i OCTETS
        if (is_own(index + $iu * THREADS)) {
            added_$i = weights_of(index + $iu * THREADS, not_above_most(lower_$i - vec4<f32>(reference_$i)), not_above_most(upper_$i - vec4<f32>(reference_$i)));
        }
    //#end
}

// Scores of which a part is lost when they are rounded may still be above it, if a compiler adds up
// without rounding them. NaN stays NaN, told by its bits.
fn not_above_most(v: vec4<f32>) -> vec4<f32> {
    let is_above = bitcast<vec4<u32>>(v - vec4<f32>(MOST_BITS)) - vec4<u32>(1u) < vec4<u32>(0x7f800000u);
    return select(v, vec4<f32>(MOST_BITS), is_above);
}

// Of each row: adds up the sum, with the sink, and stores the log-sum-exp.
fn finish_sums(index: u32) {
    //#unroll i OCTETS: if (is_own(index + $iu * THREADS)) { tell(index + $iu * THREADS, sum_$i + added_$i); }
    workgroupBarrier();
    //#unroll i OCTETS
        let octet_$i = index + $iu * THREADS;
        if (is_own(octet_$i)) {
            var sum = 0.0;
            for (var unit = 0u; unit < SCORE_UNITS; unit += 1u) {
                sum += told(octet_$i, unit);
            }
            let sink = sink_of_head * LOG2_E;
            let highest = max(reference_$i, sink);
            let share = exp2(reference_$i - highest);
            let total = sum * share + FIRST_SUM * exp2(sink - highest);
            let is_nothing = bitcast<u32>(total) == 0u;
            // NaN stays NaN, told by its bits.
            let is_number = bitcast<u32>(total) <= 0x7f800000u;
            let logarithm = select(total, accurate_log(total), is_number && !is_nothing);
            factor_$i = select(share / total, 0.0, is_nothing);
            let query = own_first + row_of(octet_$i);
            if (octet_$i % SCORE_UNITS == 0u && query < params.seq && lse_at != NOWHERE) {
                lse[lse_at + query * params.heads] = select(highest / LOG2_E + logarithm, 2.0e38, is_nothing);
            }
        }
    //#end
    workgroupBarrier();
    //#unroll i OCTETS: if (is_own(octet_$i) && octet_$i % SCORE_UNITS == 0u) { memory[result_factor_at(row_of(octet_$i))] = bitcast<vec4<u32>>(vec4<f32>(factor_$i)); }
}

const NOWHERE = 0xffffffffu;

fn put_0(row: u32, unit: u32, value: Eight) {
    store_o(q_at + row * params.q_stride + unit, value);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let group = block_of(id, count);
    // The last queries see the most keys: they begin first.
    let block = (params.seq + BLOCK - 1u) / BLOCK - 1u - group.x / SPANS;
    let span = group.x % SPANS;
    let first = block * BLOCK;
    let row0 = group.z * params.seq;
    own_first = first;
    q_at = row0 * params.q_stride + group.y * UNITS;
    kv_at = row0 * params.kv_stride + group.y / params.group * UNITS;
    lse_at = select(NOWHERE, row0 * params.heads + group.y, span == 0u);
    sink_of_head = first_highest(group.y, LEAST);
    //#unroll i OCTETS: reference_$i = LEAST; sum_$i = 0.0; added_$i = 0.0;
    let keys = keys_of_block(row0, first);
    attend(index, subgroup, first, span, Turn(keys.begin, keys.begin, keys.end, 0u, 1u, row0, 0u));
//#if saturated
    if (span == 0u && beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
}
