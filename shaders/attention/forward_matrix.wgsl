//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/forward.wgsl on matrix units. Sums of which each row has a factor of its own are out of
// reach there: a first round over the keys finds the logarithms of the softmaxes' sums, and a second
// one has the weights as they stay. Launcher: kernels/attention/matrix_units.py.
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

// In the second round the logarithm to base 2 of what a row's weights are divided by takes the sum's place.
//#unroll i OCTETS: var<private> highest_$i: f32; var<private> sum_$i: f32;

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
    if (next.other >= turn.end) {
        next.other = turn.begin;
        next.round += 1u;
    }
    return next;
}

// Scores are at most the row's highest, unless a compiler adds up without rounding them. A row with
// NaN has a divisor that is NaN.
fn weights_of_scores(s: vec4<f32>, highest: f32, divisor: f32) -> vec4<f32> {
    return exp2(min(s - vec4<f32>(highest), vec4<f32>(0.0)) * LOG2_E - vec4<f32>(divisor));
}

// Adds eight scores to the row's sum, which has its highest so far as its unit.
fn add_up(highest: f32, sum: f32, lower: vec4<f32>, upper: vec4<f32>) -> vec2<f32> {
    let both = max(lower, upper);
    let next = max(highest, max(max(both.x, both.y), max(both.z, both.w)));
    let terms = exp(lower - vec4<f32>(next)) + exp(upper - vec4<f32>(next));
    return vec2<f32>(next, sum * exp(highest - next) + dot(terms, vec4<f32>(1.0)));
}

fn weigh(index: u32, turn: Turn, info_at: u32, is_whole: bool) {
    //#unroll i OCTETS
    {
        let row = (index + $iu * THREADS) / SCORE_UNITS;
        let unit = (index + $iu * THREADS) % SCORE_UNITS;
        if (OCTETS * THREADS == BLOCK * SCORE_UNITS || row < BLOCK) {
            let at = SCORES_AT + row * SCORE_STRIDE + 2u * unit;
            var lower = scores_of(floats(at));
            var upper = scores_of(floats(at + 1u));
            if (!is_whole) {
                let query = own_first + row;
                let key = turn.other + 8u * unit;
                let own = vec4<u32>(segments[turn.row0 + min(query, params.seq - 1u)]);
//#if BLOCKS?
                take_blocks(turn.row0, vec4<u32>(query));
//#endif
                lower = select(vec4<f32>(HIDDEN), lower, sees(vec4<u32>(query), four_from(key), own, segments_of(turn.row0, key)));
                upper = select(vec4<f32>(HIDDEN), upper, sees(vec4<u32>(query), four_from(key + 4u), own, segments_of(turn.row0, key + 4u)));
            }
            if (turn.round == 0u) {
                let added = add_up(highest_$i, sum_$i, lower, upper);
                highest_$i = added.x;
                sum_$i = added.y;
            } else {
                let weights = eight(weights_of_scores(lower, highest_$i, sum_$i), weights_of_scores(upper, highest_$i, sum_$i));
                if (is_whole) {
                    put_weights(at, unit, near8(weights));
                } else {
                    put_weights(at, unit, kept8(weights));
                }
            }
        }
    }
    //#end
}

// Of each row: stores the log-sum-exp, and leaves what its weights are made of.
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
            let row = sum_of_row(SCORES_AT + row_$i * SCORE_STRIDE);
            let is_nothing = bitcast<u32>(row.sum) == 0u;
            // NaN stays NaN, told by its bits.
            let is_number = bitcast<u32>(row.sum) <= 0x7f800000u;
            let logarithm = select(row.sum, accurate_log(row.sum), is_number && !is_nothing);
            highest_$i = row.highest;
            sum_$i = logarithm * LOG2_E - WEIGHT_BITS;
            let query = own_first + row_$i;
            if (unit_$i == 0u && query < params.seq && lse_at != NOWHERE) {
                lse[lse_at + query * params.heads] = select(row.highest + logarithm, 2.0e38, is_nothing);
            }
        }
    //#end
}

const NOWHERE = 0xffffffffu;

struct Row {
    highest: f32,
    sum: f32,
}

fn sum_of_row(at: u32) -> Row {
    var highest = LEAST;
    for (var i = 0u; i < SCORE_UNITS; i += 1u) {
        highest = max(highest, floats(at + i).x);
    }
    var sum = 0.0;
    for (var i = 0u; i < SCORE_UNITS; i += 1u) {
        let part = floats(at + i);
        sum += part.y * exp(part.x - highest);
    }
    return Row(highest, sum);
}

fn put_0(row: u32, unit: u32, value: Eight) {
    store_o(q_at + row * params.q_stride + unit, scale8(value, 1.0 / WEIGHT_SCALE));
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
