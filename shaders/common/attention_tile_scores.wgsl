// Scores that each invocation of attention's tiles holds by itself: those of its own rows with the
// four others 4 · lane …
const SIDE = 128u;  // fours of rows by units that a side has at most in a turn

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
// mix_M += score_M, by now weights, times the other side's rows.
fn mix_tile_$m(index: u32, other_first: u32, unit_first: u32) {
    for (var part = 0u; part < FOURS; part += PART) {
        if (lane / PART * PART == part) {
            //#unroll b OWN, k 4: tile[$k][(lane - part) * FOURS + (own_four($bu) ^ (lane - part))] = score_$m[$b][$k];
        }
        mix_part_$m(index, other_first + 4u * part, unit_first);
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
