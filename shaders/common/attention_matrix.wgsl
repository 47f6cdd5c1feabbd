// Attention on matrix units, what its kernels share. A workgroup owns BLOCK rows of a head (queries,
// or keys) and walks the others OTHERS at a time, in turns. Own rows lie in STRIPS strips of
// FRAGMENTS · MATRIX_M; two subgroups share one. Each holds own rows as left factors (of both
// matrices, BACKWARD, the one or the other), and makes products with the others' rows, half of them.
// Those become scores in workgroup memory, and weights where they lie; and weights times the others'
// rows are added up to the results, of which each has half of the columns. An element of a matrix
// cannot be reached: what is made of elements goes through workgroup memory.
//
// A kernel defines after(turn): the walk; own_N(row, unit) and other_N(turn, row, unit): both sides'
// rows as factors, in units of eight, rows past the last repeating it; is_near(turn): whether all own
// rows may see all of a turn's, or be seen, by where they are; with INFORMED told_of(i, turn) and
// ready_of(i, told): of INFOS numbers of each of the others the one of four, loaded and made ready; weigh(index, turn, info_at, is_whole):
// weights of scores; put_N(row, unit, value): results, of which there are MIXES.
//
// Without BACKWARD, each own row has a reference that its weights are relative to, and weigh sets
// `raised` if a weight is too large for it, and `grown` if the row has weights already. It also
// defines what is then done: tell_highest(index), raise_references(index, is_all),
// rescale_results(index) and weigh_again(index); and finish_sums(index): log-sum-exps, and the factor
// of each row's results.
//
// Most turns are whole: each own row sees each of the others, whose numbers are all finite. Then
// weights need neither masks nor a look at what they are. (An own row's NaN is kept by the turn with
// that row among the others, which is not whole.)
//#if HALF
//#include common/eight_float16.wgsl
alias Factor = f16;
const VECTOR = 8u; // factors of a vector
//#else
alias Factor = f32;
const VECTOR = 4u;
//#endif

const UNITS = HEAD / 8u;
const ROWS = FRAGMENTS * MATRIX_M; // of a strip
const UNIT = 8u / VECTOR; // vectors of a unit
// One vector more than needed, so that rows do not begin in the same bank of workgroup memory.
const STRIDE = HEAD / VECTOR + 1u;
const TILE = OTHERS * STRIDE;
const OWN_UNITS = UNITS / OWN_PARTS;
const OWN_STRIDE = OWN_UNITS * UNIT + 1u;
const SCORE_STRIDE = OTHERS / 4u + 1u;
const SCORES = BLOCK * SCORE_STRIDE;
const SCORES_AT = 2u * TILE;
const SCORE_UNITS = OTHERS / 8u;
//#if BACKWARD
const OWN_STEP = BLOCK;
const RIGHT_STEP = TILE;
const SCORE_STEP = SCORES;
const INFO_AT = SCORES_AT + 2u * SCORES;
//#else
const OWN_STEP = 0u;
const RIGHT_STEP = SCORE_COLUMNS * MATRIX_N * STRIDE;
const SCORE_STEP = SCORE_COLUMNS * MATRIX_N / 4u;
const INFO_AT = SCORES_AT + SCORES;
//#endif
const INFO_FOURS = OTHERS / 4u;
const RESULT_STRIDE = MATRIX_N / 2u + 1u;
const RESULT_UNITS = MATRIX_N / 4u;
//#if !BACKWARD

// Where the factor of a row's results lies: next to them, where no matrix is stored.
fn result_factor_at(row: u32) -> u32 {
    return (row + 1u) * RESULT_STRIDE - 1u;
}
//#endif

const LOG2_E = 1.44269504;

var<workgroup> memory: array<vec4<u32>, MEMORY>;
// By turns: one more than where the others begin that are not all of the own rows' sample.
var<workgroup> mixed: array<atomic<u32>, 2>;
// Whether no turn is whole.
var<workgroup> careful: atomic<u32>;
//#if !BACKWARD
// One more than where the others begin of the last turn in which a weight was too large, and in which
// that was in a row with weights of earlier turns.
var<workgroup> raised: u32;
var<workgroup> grown: u32;
//#endif
var<private> is_spoilt: bool; // where numbers of the walk are known not to be finite

// Where a walk is: at the others from `other` on; of `rounds` rounds, each from begin to end.
struct Turn {
    other: u32,
    begin: u32,
    end: u32,
    round: u32,
    rounds: u32,
    row0: u32,
    segment: u32,
}

// Eight values as factors, and to their place. Those of near8 are finite and not beyond f16's end.
//#if HALF
alias Kept = vec4<u32>;

fn kept8(v: Eight) -> Kept {
    return f16_of_eight(v);
}

fn near8(v: Eight) -> Kept {
    return near_f16(v);
}

fn put_kept(at: u32, v: Kept) {
    memory[at] = v;
}
//#else
alias Kept = Eight;

fn kept8(v: Eight) -> Kept {
    return v;
}

fn near8(v: Eight) -> Kept {
    return v;
}

fn put_kept(at: u32, v: Kept) {
    memory[at] = bitcast<vec4<u32>>(low(v));
    memory[at + 1u] = bitcast<vec4<u32>>(high(v));
}
//#endif

// Eight weights where the scores were that they were made of. In f16 they take half of the place:
// that next to their neighbours'.
fn put_weights(at: u32, unit: u32, weights: Kept) {
//#if HALF
    put_kept(at + 1u - unit % 2u, weights);
//#else
    put_kept(at, weights);
//#endif
}

fn weights_at(k: u32) -> u32 {
//#if HALF
    return k / 4u + 1u - k / 8u % 2u;
//#else
    return k / 4u;
//#endif
}

fn floats(at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(memory[at]);
}

// The sample of all own rows, from first on; turns are looked at with care where there is none.
fn sample_of_own(index: u32, row0: u32, first: u32) -> u32 {
    let sample = segments[row0 + first];
    if (is_spoilt) {
        atomicStore(&careful, 1u);
    }
    for (var i = index; i < BLOCK; i += THREADS) {
        if (sample == 0u || segments[row0 + min(first + i, params.seq - 1u)] != sample) {
            atomicStore(&careful, 1u);
        }
    }
    return sample;
}

fn put_own(at: u32, side: u32, row: u32, unit: u32) {
    if (side == 0u) {
        put_kept(at, own_0(row, unit));
    }
//#if BACKWARD
    if (side == 1u) {
        put_kept(at, own_1(row, unit));
    }
//#endif
}

fn sample_at(turn: Turn, other: u32) -> u32 {
    return segments[turn.row0 + min(turn.other + other, params.seq - 1u)];
}

fn attend(index: u32, subgroup: u32, first: u32, span: u32, begin: Turn) {
    let strip = subgroup / 2u * ROWS;
    let half = subgroup % 2u;
    // Not every driver is told to begin with zeros.
    if (index == 0u) {
        atomicStore(&careful, 0u);
        atomicStore(&mixed[0], 0u);
        atomicStore(&mixed[1], 0u);
//#if !BACKWARD
        raised = 0u;
        grown = 0u;
//#endif
    }
    // Own rows pass through the memory in parts of their columns.
    let left_at = (half * OWN_STEP + strip) * OWN_STRIDE;
    //#unroll p OWN_PARTS
        for (var i = index; i < OWN_SIDES * BLOCK * OWN_UNITS; i += THREADS) {
            let row = i / OWN_UNITS % BLOCK;
            put_own(i / OWN_UNITS * OWN_STRIDE + i % OWN_UNITS * UNIT, i / OWN_UNITS / BLOCK, first + row, $pu * OWN_UNITS + i % OWN_UNITS);
        }
        workgroupBarrier();
        //#unroll f FRAGMENTS, k PART_STEPS
            let left_$p_$f_$k = subgroupMatrixLoad<subgroup_matrix_left<Factor, MATRIX_K, MATRIX_M>, row_major>(&memory, left_at + $fu * MATRIX_M * OWN_STRIDE + $ku * MATRIX_K / VECTOR, OWN_STRIDE);
        //#end
        workgroupBarrier();
    //#end
    //#unroll m MIXES, f FRAGMENTS, c COLUMNS
        var mix_$m_$f_$c: subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;
    //#end
    let right_at = half * RIGHT_STEP;
    let score_at = SCORES_AT + half * SCORE_STEP + strip * SCORE_STRIDE;
    let first_column = (2u * span + half) * COLUMNS;
    //#unroll c COLUMNS: let column_$c = min(first_column + $cu, HEAD / MATRIX_N - 1u) * MATRIX_N / VECTOR;
    let sample = sample_of_own(index, begin.row0, first);
    var turn = begin;
    //#unroll i LOADS
        let row_$i = (index + $iu * THREADS) / UNITS;
        let unit_$i = (index + $iu * THREADS) % UNITS;
        let place_$i = row_$i * STRIDE + unit_$i * UNIT;
        var kept_0_$i = other_0(turn, turn.other + row_$i, unit_$i);
        var kept_1_$i = other_1(turn, turn.other + row_$i, unit_$i);
    //#end
    //#unroll i LOOKS: var sample_$i = sample_at(turn, index + $iu * THREADS);
//#if INFORMED
    var told = told_of(index, turn);
//#endif
    // What is known of this turn's others and of the next one's takes turns, too.
    var slot = 0u;
    //#unroll i LOOKS
        if (index + $iu * THREADS < OTHERS && sample_$i != sample) {
            atomicStore(&mixed[slot], turn.other + 1u);
        }
    //#end
//#if INFORMED
    if (index < INFOS * INFO_FOURS) {
        memory[INFO_AT + index] = bitcast<vec4<u32>>(ready_of(index, told));
    }
//#endif
    while (turn.round < turn.rounds) {
        //#unroll i LOADS
            if (LOADS * THREADS == OTHERS * UNITS || row_$i < OTHERS) {
                put_kept(place_$i, kept_0_$i);
                put_kept(TILE + place_$i, kept_1_$i);
            }
        //#end
        workgroupBarrier();
        let next = after(turn);
        // The next turn's arrive while this one's are multiplied. (Loads outside of a branch are moved
        // to where they are stored by some compilers.)
        if (next.round < next.rounds) {
            //#unroll i LOADS: kept_0_$i = other_0(next, next.other + row_$i, unit_$i);
            //#unroll i LOADS: kept_1_$i = other_1(next, next.other + row_$i, unit_$i);
            //#unroll i LOOKS: sample_$i = sample_at(next, index + $iu * THREADS);
//#if INFORMED
            if (index < INFOS * INFO_FOURS) {
                told = told_of(index, next);
            }
//#endif
        }
        {
            //#unroll f FRAGMENTS, s SCORE_COLUMNS
                var score_$f_$s = subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>();
            //#end
            //#unroll p OWN_PARTS, k PART_STEPS, s SCORE_COLUMNS
                let right_$p_$k_$s = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, col_major>(&memory, right_at + $su * MATRIX_N * STRIDE + ($pu * PART_STEPS + $ku) * MATRIX_K / VECTOR, STRIDE);
                //#unroll f FRAGMENTS: score_$f_$s = subgroupMatrixMultiplyAccumulate(left_$p_$f_$k, right_$p_$k_$s, score_$f_$s);
            //#end
            //#unroll f FRAGMENTS, s SCORE_COLUMNS
                subgroupMatrixStore<row_major>(&memory, score_at + $fu * MATRIX_M * SCORE_STRIDE + $su * MATRIX_N / 4u, score_$f_$s, SCORE_STRIDE);
            //#end
        }
        //#unroll i LOOKS
            if (index + $iu * THREADS < OTHERS && sample_$i != sample) {
                atomicStore(&mixed[1u - slot], next.other + 1u);
            }
        //#end
//#if INFORMED
        if (index < INFOS * INFO_FOURS) {
            memory[INFO_AT + (1u - slot) * INFOS * INFO_FOURS + index] = bitcast<vec4<u32>>(ready_of(index, told));
        }
//#endif
        workgroupBarrier();
        let is_whole = is_near(turn) & (atomicLoad(&careful) == 0u) & (atomicLoad(&mixed[slot]) != turn.other + 1u);
        weigh(index, turn, INFO_AT + slot * INFOS * INFO_FOURS, is_whole);
        slot = 1u - slot;
//#if BACKWARD
        workgroupBarrier();
//#else
        if (workgroupUniformLoad(&raised) == turn.other + 1u) {
            tell_highest(index);
            let is_grown = workgroupUniformLoad(&grown) == turn.other + 1u;
            raise_references(index, is_grown);
            workgroupBarrier();
            if (is_grown) {
                // A matrix at a time lies where the subgroup's scores were.
                //#unroll c COLUMNS
                    //#unroll f FRAGMENTS: subgroupMatrixStore<row_major>(&memory, score_at + $fu * MATRIX_M * SCORE_STRIDE, mix_0_$f_$c, SCORE_STRIDE);
                    workgroupBarrier();
                    rescale_results(index);
                    workgroupBarrier();
                    //#unroll f FRAGMENTS: mix_0_$f_$c = subgroupMatrixLoad<subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>, row_major>(&memory, score_at + $fu * MATRIX_M * SCORE_STRIDE, SCORE_STRIDE);
                    workgroupBarrier();
                //#end
            }
            weigh_again(index);
            workgroupBarrier();
        }
//#endif
        for (var k = 0u; k < OTHERS; k += MATRIX_K) {
            //#unroll m MIXES
                let weight_at_$m = SCORES_AT + $mu * SCORES + strip * SCORE_STRIDE + weights_at(k);
                //#unroll f FRAGMENTS
                    let weight_$m_$f = subgroupMatrixLoad<subgroup_matrix_left<Factor, MATRIX_K, MATRIX_M>, row_major>(&memory, weight_at_$m + $fu * MATRIX_M * SCORE_STRIDE, SCORE_STRIDE);
                //#end
                //#unroll c COLUMNS
                    let mixed_$m_$c = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, row_major>(&memory, ($mu + MIXED_TILE) * TILE + k * STRIDE + column_$c, STRIDE);
                    //#unroll f FRAGMENTS: mix_$m_$f_$c = subgroupMatrixMultiplyAccumulate(weight_$m_$f, mixed_$m_$c, mix_$m_$f_$c);
                //#end
            //#end
        }
        workgroupBarrier();
        turn = next;
    }
//#if !BACKWARD
    finish_sums(index);
//#endif
    //#unroll m MIXES, c COLUMNS
        //#unroll f FRAGMENTS
            subgroupMatrixStore<row_major>(&memory, (strip + $fu * MATRIX_M) * RESULT_STRIDE + half * MATRIX_N / 4u, mix_$m_$f_$c, RESULT_STRIDE);
        //#end
        workgroupBarrier();
        for (var i = index; i < BLOCK * RESULT_UNITS; i += THREADS) {
            let at = i / RESULT_UNITS * RESULT_STRIDE + i % RESULT_UNITS * 2u;
            // Of the units of both halves' columns.
            let column = (2u * span + i % RESULT_UNITS / (RESULT_UNITS / 2u)) * COLUMNS + $cu;
            let unit = column * (MATRIX_N / 8u) + i % (MATRIX_N / 8u);
            if (first + i / RESULT_UNITS < params.seq && unit < UNITS) {
//#if BACKWARD
                put_$m(first + i / RESULT_UNITS, unit, eight(floats(at), floats(at + 1u)));
//#else
                put_$m(first + i / RESULT_UNITS, unit, scale8(eight(floats(at), floats(at + 1u)), floats(result_factor_at(i / RESULT_UNITS)).x));
//#endif
            }
        }
        workgroupBarrier();
    //#end
}
