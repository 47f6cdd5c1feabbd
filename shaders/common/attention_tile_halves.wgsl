// Scores of attention's backward for GPUs of few registers, half of what an invocation has otherwise:
// one half of a workgroup's invocations multiplies own_0 and other_0, the other own_1 and other_1,
// each four own rows by four of OTHERS others. The products meet in workgroup memory, and of two
// places of four pairs each invocation makes weights, which stay there.
const OTHERS = 32u;
const OTHER_FOURS = 8u;  // in OTHERS: all whose weights are in workgroup memory
const HALF = 128u;  // of the workgroup's invocations

// product[k]: of four own rows with the k-th of four others.
var<private> product: array<vec4<f32>, 4>;

// Where the invocation's scores are: four others by four own rows, of which of the two products.
struct Place {
    other: u32,
    own: u32,
    half: u32,
}

fn place_of(index: u32) -> Place {
    return Place(index % OTHER_FOURS, index / OTHER_FOURS % FOURS, index / HALF);
}

fn at_place(place: Place) -> u32 {
    return place.other * FOURS + (place.own ^ place.other);
}

// CHUNK units of a product's rows, turned: four rows of a column are a vector. An invocation has four
// rows of a unit, which are all loaded before the first is stored.
fn stage_half(index: u32, own_first: u32, other_first: u32, unit_first: u32) {
    let i = index % HALF;
    let unit = i % CHUNK;
    let four = i / CHUNK;
    if (four < FOURS + OTHER_FOURS && unit_first + unit < UNITS) {
        let is_own = four < FOURS;
        let row = 4u * four + select(other_first - 4u * FOURS, own_first, is_own);
        let own_at = unit * FOURS + (four ^ (unit % 8u));
        let other_at = CHUNK * FOURS + unit * OTHER_FOURS + ((four - FOURS) ^ (unit % 8u));
        let at = index / HALF * HALF + select(other_at, own_at, is_own);
        //#unroll r 4: var x_$r: vec4<f32>;
        if (index < HALF) {
            if (is_own) {
                //#unroll r 4: x_$r = own_0(min(row + $ru, params.seq - 1u), unit_first + unit);
            } else {
                //#unroll r 4: x_$r = other_0(min(row + $ru, params.seq - 1u), unit_first + unit);
            }
        } else {
            if (is_own) {
                //#unroll r 4: x_$r = own_1(min(row + $ru, params.seq - 1u), unit_first + unit);
            } else {
                //#unroll r 4: x_$r = other_1(min(row + $ru, params.seq - 1u), unit_first + unit);
            }
        }
        //#unroll j 4: tile[$j][at] = vec4<f32>(x_0[$j], x_1[$j], x_2[$j], x_3[$j]);
    }
}

fn multiply_half(place: Place, units: u32) {
    for (var unit = 0u; unit < units; unit += 1u) {
        let swap = unit % 8u;
        let own_at = place.half * HALF + unit * FOURS + (place.own ^ swap);
        let other_at = place.half * HALF + CHUNK * FOURS + unit * OTHER_FOURS + (place.other ^ swap);
        //#unroll j 4
            let y_$j = tile[$j][other_at];
            let x_$j = tile[$j][own_at];
            //#unroll k 4: product[$k] += x_$j * y_$j[$k];
        //#end
    }
}

// The products of all of the head, both in workgroup memory: [k][at_place] and HALF places behind.
fn score_halves(index: u32, own_first: u32, other_first: u32) {
    let place = place_of(index);
    //#unroll k 4: product[$k] = vec4<f32>(0.0);
    for (var unit = 0u; unit < UNITS; unit += CHUNK) {
        stage_half(index, own_first, other_first, unit);
        workgroupBarrier();
        multiply_half(place, min(turns(CHUNK), UNITS - unit));
        workgroupBarrier();
    }
    //#unroll k 4: tile[$k][place.half * HALF + at_place(place)] = product[$k];
    workgroupBarrier();
}
