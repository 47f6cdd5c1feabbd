// Attention through workgroup memory, what its kernels share. A workgroup owns BLOCK rows of a head
// (queries, or keys) and walks the others, BLOCK at a time or (HALVES) half as many: products of both
// sides' rows, CHUNK units of the head at once, become scores, and those weights of the other side's
// rows, whose sums are the results' SPAN units of four columns from span_first on.
//
// An invocation has, of the results, the OWN fours of own rows line + LINES · b and the units
// lane + LANES · c.
//
// A kernel defines own_N(row, unit) and other_N(row, unit) for its PRODUCTS, and mixed_N(row, unit)
// for its MIXES. THREADS = LANES · LINES; BLOCK = 4 · OWN · LINES = 4 · LANES.
//#include common/attention_masks.wgsl
//#if HALVES
//#include common/attention_tile_halves.wgsl
//#else
//#include common/attention_tile_scores.wgsl
//#endif

const FOURS = 16u;  // of rows, in BLOCK
const PART = 8u;  // fours of others whose weights are in workgroup memory at a time

// Of four neighbouring rows or units each lies in an array of its own, so that one place reaches
// all. Places are swapped so that neighbouring invocations reach neighbouring memory both ways.
var<workgroup> tile: array<array<vec4<f32>, 256>, 4>;

var<private> lane: u32;
var<private> line: u32;

fn take_place(index: u32) {
    lane = index % LANES;
    line = index / LANES;
}

// How many turns a loop takes. With FEW_REGISTERS no compiler knows, and writes all of them out,
// which takes more registers: seq is never 0.
fn turns(count: u32) -> u32 {
//#if FEW_REGISTERS
    return select(count, 0u, params.seq == 0u);
//#else
    return count;
//#endif
}

fn own_four(b: u32) -> u32 {
    return line + b * LINES;
}

//#unroll m MIXES
// mix_M[row][c]: the results.
var<private> mix_$m: array<array<vec4<f32>, COLUMNS>, 4 * OWN>;

// ROWS fours of the other side's rows as they are; all are loaded before the first is stored.
fn stage_mixed_$m(index: u32, other_first: u32, unit_first: u32) {
    //#unroll t MIXED_LOADS
        let row_$t = (index + $tu * THREADS) / SPAN;
        let unit_$t = (index + $tu * THREADS) % SPAN;
        let value_$t = mixed_$m(min(other_first + row_$t, params.seq - 1u), min(unit_first + unit_$t, UNITS - 1u));
    //#end
    //#unroll t MIXED_LOADS
        if (4u * ROWS * SPAN == MIXED_LOADS * THREADS || row_$t < 4u * ROWS) {
            tile[row_$t % 4u][PART * FOURS + row_$t / 4u * SPAN + unit_$t] = value_$t;
        }
    //#end
}

fn add_mixed_$m(first: u32) {
    //#unroll c COLUMNS: let unit_$c = PART * FOURS + min(lane + $cu * LANES, SPAN - 1u);
//#if ROW_BY_ROW
    for (var row = 0u; row < turns(4u * ROWS); row += 1u) {
        let four = row / 4u;
        let begin = row % 4u;
//#else
    for (var four = 0u; four < turns(ROWS); four += 1u) {
        let begin = 0u;
//#endif
        let other = first + four;
        //#unroll b OWN: let weight_at_$b = other * FOURS + (own_four($bu) ^ other);
        //#unroll c COLUMNS: let mixed_at_$c = four * SPAN + unit_$c;
        //#unroll j TOGETHER
            //#unroll b OWN: let weight_$b_$j = tile[begin + $ju][weight_at_$b];
            //#unroll c COLUMNS
                let mixed_$c_$j = tile[begin + $ju][mixed_at_$c];
                //#unroll b OWN, r 4: mix_$m[4 * $b + $r][$c] += weight_$b_$j[$r] * mixed_$c_$j;
            //#end
        //#end
    }
}

// mix_M += the PART weights in workgroup memory times the other side's rows from other_first on.
fn mix_part_$m(index: u32, other_first: u32, unit_first: u32) {
    for (var four = 0u; four < turns(PART); four += ROWS) {
        stage_mixed_$m(index, other_first + 4u * four, unit_first);
        workgroupBarrier();
        add_mixed_$m(four);
        workgroupBarrier();
    }
}
//#end
