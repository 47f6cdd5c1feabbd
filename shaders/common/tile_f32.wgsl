// A workgroup's tile of a GEMM in float32: 8·WG_M rows by 8·WG_N columns of results, WG_M · WG_N
// invocations with 8 × 8 each, operands passing through workgroup memory TILE_K deep.
//
// A unit is eight elements, stored as its even and its odd ones: where both operands lie along k,
// the order of k is their own affair. The next tile's units are loaded before this one is
// multiplied, so that the loads' latency is hidden. Most indices are constants, so that addresses
// and checks of bounds are computed once for many.
const TILE_K = 16u;
const TILE_M = 8u * WG_M;
const TILE_N = 8u * WG_N;
const THREADS = WG_M * WG_N;

// x along k: row i·WG_M + down is the i-th of eight of the invocations `down`. A row's four vectors
// are turned about (turn), so that neither eight neighbouring rows nor one row's units meet in a
// bank.
var<workgroup> x_tile: array<array<array<vec4<f32>, 4>, WG_M>, 8>;
//#if W_ROWS
// w likewise: [j][across] is what makes column 8·across + j.
var<workgroup> w_tile: array<array<array<vec4<f32>, 4>, WG_N>, 8>;
//#else
// w along the columns: [k][0] the even ones of each eight, [k][1] the odd ones.
var<workgroup> w_tile: array<array<array<vec4<f32>, WG_N>, 2>, TILE_K>;
//#endif

//#unroll i 8, j 8: var<private> sum_$i_$j: f32;

fn turn(row: u32) -> u32 {
    return (row / 2u) % 4u;
}

// A unit of x, the first or the second of its row's two.
fn put_x(row: u32, unit: u32, v: Eight) {
    let at = (2u * unit) ^ turn(row);
    x_tile[row / WG_M][row % WG_M][at] = v.even;
    x_tile[row / WG_M][row % WG_M][at ^ 1u] = v.odd;
}
//#if W_ROWS

// The column of the results that a row of w_tile makes.
fn column_of(row: u32) -> u32 {
    return row % WG_N * 8u + row / WG_N;
}

fn put_w(row: u32, unit: u32, v: Eight) {
    let at = (2u * unit) ^ turn(row);
    w_tile[row / WG_N][row % WG_N][at] = v.even;
    w_tile[row / WG_N][row % WG_N][at ^ 1u] = v.odd;
}
//#else

fn put_w(k: u32, unit: u32, v: Eight) {
    w_tile[k][0][unit] = v.even;
    w_tile[k][1][unit] = v.odd;
}
//#endif

// Adds the product of four k of the tiles to the sums, unrolled: 256 multiply-adds. An invocation
// holds 32 of x, and of w a few at a time, which compilers load ahead where registers last. Where
// they do not (HOLDS_W), it holds 32 of w, which lie along the columns, and four of x.
fn multiply(q: u32, across: u32, down: u32) {
    let x_turn = turn(down);
    let w_turn = turn(across);
//#if HOLDS_W
    // Of each unit's eight k the even ones are in one vector of x, the odd ones in the next.
    let k = q / 2u * 8u + q % 2u;
    //#unroll t 4
        let even_$t = w_tile[k + $tu * 2u][0][across];
        let odd_$t = w_tile[k + $tu * 2u][1][across];
    //#end
    //#unroll i 8
        {
            let x = x_tile[$iu][down][q ^ x_turn];
            //#unroll t 4
                sum_$i_0 += x[$tu] * even_$t.x; sum_$i_1 += x[$tu] * odd_$t.x;
                sum_$i_2 += x[$tu] * even_$t.y; sum_$i_3 += x[$tu] * odd_$t.y;
                sum_$i_4 += x[$tu] * even_$t.z; sum_$i_5 += x[$tu] * odd_$t.z;
                sum_$i_6 += x[$tu] * even_$t.w; sum_$i_7 += x[$tu] * odd_$t.w;
            //#end
        }
    //#end
//#else
    //#unroll i 8: let x_$i = x_tile[$iu][down][q ^ x_turn];
//#if W_ROWS
    //#unroll j 8
        {
            let w = w_tile[$ju][across][q ^ w_turn];
            //#unroll t 4, i 8: sum_$i_$j += x_$i[$tu] * w[$tu];
        }
    //#end
//#else
    // Of each unit's eight k the even ones are in one vector of x, the odd ones in the next.
    //#unroll t 4
        {
            let k = q / 2u * 8u + q % 2u + $tu * 2u;
            let even = w_tile[k][0][across];
            let odd = w_tile[k][1][across];
            //#unroll i 8
                sum_$i_0 += x_$i[$tu] * even.x; sum_$i_1 += x_$i[$tu] * odd.x;
                sum_$i_2 += x_$i[$tu] * even.y; sum_$i_3 += x_$i[$tu] * odd.y;
                sum_$i_4 += x_$i[$tu] * even.z; sum_$i_5 += x_$i[$tu] * odd.z;
                sum_$i_6 += x_$i[$tu] * even.w; sum_$i_7 += x_$i[$tu] * odd.w;
            //#end
        }
    //#end
//#endif
//#endif
}

fn product(index: u32, is_first_part: bool, m0: u32, c0: u32, k_first: u32, k_last: u32) {
    // Of a subgroup eight neighbours across and four down share what they read.
    let across = index % 8u + index / 32u % (WG_N / 8u) * 8u;
    let down = index / 8u % 4u + index / (4u * WG_N) * 4u;
    let unit = index % 2u;
//#if u
    if (is_first_part) {
        add_term(index, across, down, m0, c0);
    }
//#endif
    //#unroll i X_UNITS
        let x_at_$i = index / 2u + $iu * (THREADS / 2u);
        var x_$i = raw_unit(m0 + x_at_$i, k_unit(k_first / 8u + unit));
    //#end
    //#unroll j W_UNITS
//#if W_ROWS
        let w_at_$j = index / 2u + $ju * (THREADS / 2u);
        var w_$j = raw_w(w_row(c0 + column_of(w_at_$j)) + k_unit(k_first / 8u + unit));
//#else
        let w_at_$j = index / WG_N + $ju * WG_M;
        var w_$j = raw_w(w_columns(c0 + index % WG_N * 8u) + w_row(k_first + w_at_$j));
//#endif
    //#end
    for (var k0 = k_first; k0 < k_last; k0 += TILE_K) {
        let factor = params.scale * k_factor(k0 / 8u + unit);
        //#unroll i X_UNITS: put_x(x_at_$i, unit, scale8(unpack_x(x_$i), factor));
//#if W_ROWS
        //#unroll j W_UNITS: put_w(w_at_$j, unit, unpack_w(w_$j));
//#else
        //#unroll j W_UNITS: put_w(w_at_$j, index % WG_N, unpack_w(w_$j));
//#endif
        workgroupBarrier();
        let next = k_unit((k0 + TILE_K) / 8u + unit);
        for (var q = 0u; q < TILE_K / 4u; q += 1u) {
            // Within the loop, lest a compiler moves the loads behind it, to where they are used.
            if (q == 0u) {
                //#unroll i X_UNITS: x_$i = raw_unit(m0 + x_at_$i, next);
//#if W_ROWS
                //#unroll j W_UNITS: w_$j = raw_w(w_row(c0 + column_of(w_at_$j)) + next);
//#else
                //#unroll j W_UNITS: w_$j = raw_w(w_columns(c0 + index % WG_N * 8u) + w_row(k0 + TILE_K + w_at_$j));
//#endif
            }
            multiply(q, across, down);
        }
        workgroupBarrier();
    }
    let c = c0 + 8u * across;
    //#unroll i 8
        finish4(m0 + $iu * WG_M + down, c, vec4<f32>(sum_$i_0, sum_$i_1, sum_$i_2, sum_$i_3));
        finish4(m0 + $iu * WG_M + down, c + 4u, vec4<f32>(sum_$i_4, sum_$i_5, sum_$i_6, sum_$i_7));
    //#end
}
//#if u

// The adapter's term: a product of the same tiles, r deep, before all others; of several layers one
// after the other, each in its own columns.
fn add_term(index: u32, across: u32, down: u32, m0: u32, c0: u32) {
    let last = layer_of(min(c0 + TILE_N, params.columns) - 1u);
    let units = (params.r + 7u) / 8u;
    for (var layer = layer_of(c0); layer <= last; layer += 1u) {
        for (var first = 0u; first < units; first += TILE_K / 8u) {
            put_term(index, m0, c0, layer, first);
            workgroupBarrier();
            // As many as there are: compilers that know how many write all of them out.
            for (var q = 0u; q < min(TILE_K / 4u, 2u * (units - first)); q += 1u) {
                multiply(q, across, down);
            }
            workgroupBarrier();
        }
    }
//#if DROPOUT
    //#unroll i 8
        mask_$i(m0 + $iu * WG_M + down, c0 + 8u * across);
    //#end
//#endif
}

fn put_term(index: u32, m0: u32, c0: u32, layer: u32, first: u32) {
    let unit = index % 2u;
    let units = (params.r + 7u) / 8u;
    let at = min(first + unit, units - 1u);
    let factor = f32(first + unit < units);
    //#unroll i X_UNITS
        let row_$i = index / 2u + $iu * (THREADS / 2u);
        put_x(row_$i, unit, scale8(term_unit_x(m0 + row_$i, layer, at), factor));
    //#end
    //#unroll j W_UNITS
//#if W_ROWS
        let w_at_$j = index / 2u + $ju * (THREADS / 2u);
        let column_$j = c0 + column_of(w_at_$j);
        put_w(w_at_$j, unit, scale8(term_unit_w(column_$j, at), f32(layer_of(column_$j) == layer)));
//#else
        let w_at_$j = index / WG_N + $ju * WG_M;
        put_w(w_at_$j, index % WG_N, term_unit_w(c0 + index % WG_N * 8u, 8u * first + w_at_$j));
//#endif
    //#end
}

//#if DROPOUT

//#unroll i 8
    fn mask_$i(row: u32, column: u32) {
        let at = row * params.y_stride * 4u + column;
        let lo = dropout_mask4(at);
        let hi = dropout_mask4(at + 4u);
        //#unroll j 4: sum_$i_$j *= lo[$ju];
        sum_$i_4 *= hi.x; sum_$i_5 *= hi.y; sum_$i_6 *= hi.z; sum_$i_7 *= hi.w;
    }
//#end
//#endif
//#endif
