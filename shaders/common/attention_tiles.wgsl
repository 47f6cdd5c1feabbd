// Attention through workgroup memory, what its kernels share. A workgroup owns BLOCK rows of a head
// (queries, or keys) and walks the others BLOCK at a time: products of both sides' rows, CHUNK units
// of the head at once, become scores, and those weights of the other side's rows, whose sums are the
// results' SPAN units of four columns from span_first on.
//
// An invocation has the scores of OWN fours of own rows, line + LINES · b, and of the four others
// 4 · lane …; and of the results the same rows and the units lane + LANES · c.
//
// A kernel defines own_N(row, unit) and other_N(row, unit) for its PRODUCTS, and mixed_N(row, unit)
// for its MIXES. THREADS = LANES · LINES; BLOCK = 4 · OWN · LINES = 4 · LANES.
//#include common/attention_masks.wgsl

const FOURS = 16u;  // of rows, in BLOCK
const SIDE = 128u;  // fours of rows by units that a side has at most in a turn
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

//#unroll n PRODUCTS
// score_N[b][k]: of the b-th four of own rows with the k-th other.
var<private> score_$n: array<array<vec4<f32>, 4>, OWN>;

// CHUNK units of all rows, turned: four rows of a column are a vector. An invocation has four rows
// of a unit, of both sides or (!BOTH) of one; all are loaded before the first is stored.
fn stage_$n(index: u32, own_first: u32, other_first: u32, unit_first: u32) {
    let i = index % SIDE;
    let unit = i % CHUNK;
    let four = i / CHUNK;
    if (four < FOURS && unit_first + unit < UNITS) {
        let at = unit * FOURS + (four ^ (unit % 8u));
//#if BOTH
        //#unroll r 4: let x_$r = own_$n(min(own_first + 4u * four + $ru, params.seq - 1u), unit_first + unit);
        //#unroll r 4: let y_$r = other_$n(min(other_first + 4u * four + $ru, params.seq - 1u), unit_first + unit);
        //#unroll j 4: tile[$j][at] = vec4<f32>(x_0[$j], x_1[$j], x_2[$j], x_3[$j]);
        //#unroll j 4: tile[$j][CHUNK * FOURS + at] = vec4<f32>(y_0[$j], y_1[$j], y_2[$j], y_3[$j]);
//#else
        //#unroll r 4: var x_$r: vec4<f32>;
        if (index < SIDE) {
            //#unroll r 4: x_$r = own_$n(min(own_first + 4u * four + $ru, params.seq - 1u), unit_first + unit);
        } else {
            //#unroll r 4: x_$r = other_$n(min(other_first + 4u * four + $ru, params.seq - 1u), unit_first + unit);
        }
        let side = select(CHUNK * FOURS, 0u, index < SIDE);
        //#unroll j 4: tile[$j][side + at] = vec4<f32>(x_0[$j], x_1[$j], x_2[$j], x_3[$j]);
//#endif
    }
}

fn multiply_$n(units: u32) {
    for (var unit = 0u; unit < units; unit += 1u) {
        let swap = unit % 8u;
        //#unroll b OWN: let own_at_$b = unit * FOURS + (own_four($bu) ^ swap);
        let other_at = (CHUNK + unit) * FOURS + (lane ^ swap);
        //#unroll j 4
            let y_$j = tile[$j][other_at];
            //#unroll b OWN
                let x_$b_$j = tile[$j][own_at_$b];
                //#unroll k 4: score_$n[$b][$k] += x_$b_$j * y_$j[$k];
            //#end
        //#end
    }
}

// score_N = own · other for all of the head.
fn score_tile_$n(index: u32, own_first: u32, other_first: u32) {
    //#unroll b OWN, k 4: score_$n[$b][$k] = vec4<f32>(0.0);
    for (var unit = 0u; unit < UNITS; unit += CHUNK) {
        stage_$n(index, own_first, other_first, unit);
        workgroupBarrier();
        multiply_$n(min(turns(CHUNK), UNITS - unit));
        workgroupBarrier();
    }
}
//#end

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
    for (var four = 0u; four < turns(ROWS); four += 1u) {
        let other = first + four;
        //#unroll b OWN: let weight_at_$b = other * FOURS + (own_four($bu) ^ other);
        //#unroll c COLUMNS: let mixed_at_$c = four * SPAN + unit_$c;
        //#unroll j 4
            //#unroll b OWN: let weight_$b_$j = tile[$j][weight_at_$b];
            //#unroll c COLUMNS
                let mixed_$c_$j = tile[$j][mixed_at_$c];
                //#unroll b OWN, r 4: mix_$m[4 * $b + $r][$c] += weight_$b_$j[$r] * mixed_$c_$j;
            //#end
        //#end
    }
}

// mix_M += score_M, by now weights, times the other side's rows.
fn mix_tile_$m(index: u32, other_first: u32, unit_first: u32) {
    for (var part = 0u; part < FOURS; part += PART) {
        if (lane / PART * PART == part) {
            //#unroll b OWN, k 4: tile[$k][(lane - part) * FOURS + (own_four($bu) ^ (lane - part))] = score_$m[$b][$k];
        }
        for (var four = 0u; four < PART; four += ROWS) {
            stage_mixed_$m(index, other_first + 4u * (part + four), unit_first);
            workgroupBarrier();
            add_mixed_$m(four);
            workgroupBarrier();
        }
    }
}
//#end

// The segment of all the invocation's own rows, if it is one and no padding.
fn own_sample(row0: u32, first: u32) -> u32 {
    let segment = segments[row0 + min(first + 4u * line, params.seq - 1u)];
    var alike = segment != 0u;
    //#unroll b OWN: alike = alike && all(segments_of(row0, first + 4u * own_four($bu)) == vec4<u32>(segment));
    return select(0xffffffffu, segment, alike);
}
