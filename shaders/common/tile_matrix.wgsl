// A workgroup's tile of a GEMM on matrix units: GROUPS_M × GROUPS_N subgroups with
// FRAGMENTS_M × FRAGMENTS_N products of MATRIX_M × MATRIX_N results each, factors in f16 (HALF) or
// float32, added up in float32. The same interface as tile_f32.wgsl.
//
// Tiles are stored 16 bytes at a time, and the next one's units are loaded while this one is
// multiplied. Whole tiles of float32 results go straight to y (DIRECT); what they are added to is
// where their sums begin, unless those are multiplied by something (LOADS).
//
// f16 ends at 65,504. x comes in f16 (gemm/factors.wgsl), where `exponents` is bound multiplied by a
// power of two for each of the workgroups' rows, by which the results are divided. What is beyond the
// end of w is held there and counted in `saturated`, if that is bound; NaN stays NaN, and infinity
// infinity. An adapter's term (TERM) is more of the same product: tile_matrix_term.wgsl.
const TILE_M = GROUPS_M * FRAGMENTS_M * MATRIX_M;
const TILE_N = GROUPS_N * FRAGMENTS_N * MATRIX_N;
const THREADS = GROUPS_M * GROUPS_N * SUBGROUP_SIZE;
const RESULTS = MATRIX_M * MATRIX_N;
const K_UNITS = TILE_K / 8u;

//#if HALF
alias Factor = f16;
alias Vector = vec4<u32>;
const VECTOR = 8u; // factors of a vector
//#else
alias Factor = f32;
alias Vector = vec4<f32>;
const VECTOR = 4u;
//#endif

// One more than needed, so that rows do not begin in the same bank of workgroup memory.
const X_STRIDE = TILE_K / VECTOR + 1u;
//#if W_ROWS
const W_STRIDE = TILE_K / VECTOR + 1u;
const W_HEIGHT = TILE_N;
const W_ROW_UNITS = K_UNITS;
//#else
const W_STRIDE = TILE_N / VECTOR + 1u;
const W_HEIGHT = TILE_K;
const W_ROW_UNITS = TILE_N / 8u;
//#endif
const X_COUNT = TILE_M * K_UNITS;
const W_COUNT = W_HEIGHT * W_ROW_UNITS;

// An invocation's next unit lies so many rows further on, at the same place of its row.
const X_STEP = THREADS / K_UNITS;
const W_STEP = THREADS / W_ROW_UNITS;

//#if exponents
@group(0) @binding(14) var<storage, read> exponents: array<u32>;
//#endif
//#if saturated
@group(0) @binding(15) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif

var<workgroup> x_tile: array<Vector, TILE_M * X_STRIDE>;
var<workgroup> w_tile: array<Vector, W_HEIGHT * W_STRIDE>;
var<workgroup> results: array<vec4<f32>, GROUPS_M * GROUPS_N * RESULTS / 4u>;

// Values that this invocation held at 65,504. Each is counted by one of the workgroups that have it.
var<private> beyond: u32;

//#if HALF
//#include common/eight_float16.wgsl
//#endif

// A unit of x or w, at its place in the tile.
fn put_x(at: u32, v: Eight) {
//#if HALF
    x_tile[at] = f16_of_digits(v);
//#else
    x_tile[at] = low(v);
    x_tile[at + 1u] = high(v);
//#endif
}

// A unit as it is stored, which past the last k is zero.
fn put_raw_x(at: u32, raw: Raw_x, unit: u32) {
//#if HALF
//#if WHOLE_K
    x_tile[at] = halves_x(raw);
//#else
    x_tile[at] = select(vec4<u32>(0u), halves_x(raw), unit < k_units());
//#endif
//#else
//#if WHOLE_K
    put_x(at, unpack_x(raw));
//#else
    // No factor of zero, which makes NaN of infinity.
    if (unit < k_units()) {
        put_x(at, unpack_x(raw));
    } else {
        put_x(at, zero8());
    }
//#endif
//#endif
}

fn put_w(at: u32, v: Eight) {
//#if HALF
    w_tile[at] = f16_of_digits(v);
//#else
    w_tile[at] = low(v);
    w_tile[at + 1u] = high(v);
//#endif
}

// Where the unit of w lies that belongs to a place of the tile.
fn w_place(row: u32, unit: u32, c0: u32, k0: u32) -> u32 {
//#if W_ROWS
//#if WHOLE_K
    return w_row(c0 + row) + unit + k0 / 8u;
//#else
    return w_row(c0 + row) + k_unit(k0 / 8u + unit);
//#endif
//#else
//#if WHOLE_K
    return w_columns(c0 + 8u * unit) + row * w_stride() + k0 * w_stride();
//#else
    return w_columns(c0 + 8u * unit) + w_row(k0 + row);
//#endif
//#endif
}

// Which tile is loaded while the one at k0 is multiplied: behind the last one any that exists.
fn next_tile(k0: u32, k_last: u32) -> u32 {
//#if WHOLE_K
    return min(k0 + TILE_K, k_last - TILE_K);
//#else
    return k0 + TILE_K;
//#endif
}

//#if exponents
// The exponent of x's factor, as float32 has it.
fn scale_exponent(m0: u32, k_first: u32) -> u32 {
//#if SIZED_PARTS
    return exponents[k_first / params.k_part * ((params.rows + TILE_M - 1u) / TILE_M) + m0 / TILE_M];
//#else
    return exponents[m0 / TILE_M];
//#endif
}
//#endif

//#if TERM
//#include common/tile_matrix_term.wgsl
//#endif

fn product(index: u32, is_first_part: bool, group: u32, lane: u32, m0: u32, c0: u32, k_first: u32, k_last: u32) {
    let m = (group / GROUPS_N) * FRAGMENTS_M * MATRIX_M;
    let n = (group % GROUPS_N) * FRAGMENTS_N * MATRIX_N;
//#if exponents
    let exponent = scale_exponent(m0, k_first);
    var y_scale = y_factor() * bitcast<f32>((254u - exponent) << 23u);
//#else
    let exponent = 127u;
    var y_scale = y_factor();
//#endif
//#if TERM
    clear_term_sizes(index);
//#endif
    //#unroll i FRAGMENTS_M, j FRAGMENTS_N
        var sum_$i_$j: subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;
    //#end
//#if DIRECT
//#if LOADS
    if ((ACCUMULATE || RESIDUAL) && is_whole(m0, c0)) {
//#if ACCUMULATE
        //#unroll i FRAGMENTS_M, j FRAGMENTS_N
            sum_$i_$j = subgroupMatrixLoad<subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>, row_major>(&y, y_place(m0 + m + $iu * MATRIX_M, c0 + n + $ju * MATRIX_N, k_first), y_stride());
        //#end
//#else
//#if RESIDUAL
        //#unroll i FRAGMENTS_M, j FRAGMENTS_N
            sum_$i_$j = subgroupMatrixLoad<subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>, row_major>(&residual, y_place(m0 + m + $iu * MATRIX_M, c0 + n + $ju * MATRIX_N, k_first), y_stride());
        //#end
//#endif
//#endif
    }
//#endif
//#endif
    let x_row = index / K_UNITS;
    let x_unit = index % K_UNITS;
    let x_at = x_row * X_STRIDE + x_unit * (8u / VECTOR);
    let w_line = index / W_ROW_UNITS;
    let w_unit = index % W_ROW_UNITS;
    let w_at = w_line * W_STRIDE + w_unit * (8u / VECTOR);
//#if RUNS
    // Where units lie runs on with the tiles: compilers make all of it anew each time otherwise. An
    // invocation's units are so many rows apart, one place in a register for all. Past the last row
    // they are whatever lies there, or what WebGPU reads behind a buffer's end: what is made of those
    // is not stored.
    var w_from = w_place(w_line, w_unit, c0, k_first);
    var x_from = x_place(m0 + x_row, k_first / 8u + x_unit);
    //#unroll i W_UNITS: var w_$i = raw_w(w_from + $iu * W_STEP * w_stride());
    //#unroll i X_UNITS: var x_$i = raw_x(x_from + $iu * X_STEP * x_stride());
//#else
    //#unroll i W_UNITS: var w_$i = raw_w(w_place(w_line + $iu * W_STEP, w_unit, c0, k_first));
    //#unroll i X_UNITS: var x_$i = raw_tile_unit(m0 + x_row + $iu * X_STEP, k_first / 8u, x_unit);
//#endif
    for (var k0 = k_first; k0 < k_last; k0 += TILE_K) {
        // Before the branch below, behind which the next tile's units would need registers of their own.
        //#unroll i W_UNITS
            if (W_UNITS * THREADS == W_COUNT || w_line + $iu * W_STEP < W_HEIGHT) {
//#if HALF
                // Weights that are f16 already are copied.
                w_tile[w_at + $iu * (W_STEP * W_STRIDE)] = halves_w(w_$i);
//#if saturated
                if (m0 == 0u && c0 + w_line + $iu * W_STEP < params.columns && k0 / 8u + w_unit < k_units()) { beyond += beyond_w(w_$i); }
//#endif
//#else
                put_w(w_at + $iu * (W_STEP * W_STRIDE), unpack_w(w_$i));
//#endif
            }
        //#end
        let unit = k0 / 8u + x_unit;
        //#unroll i X_UNITS
            if (X_UNITS * THREADS == X_COUNT || x_row + $iu * X_STEP < TILE_M) {
                put_raw_x(x_at + $iu * (X_STEP * X_STRIDE), x_$i, unit);
            }
        //#end
        workgroupBarrier();
//#if ROLLED
        // No compiler knows how often: written out, the loop takes so many registers that a
        // workgroup is alone on its core.
        let k_end = min(TILE_K, k_part());
//#else
        const k_end = TILE_K;
//#endif
        for (var k = 0u; k < k_end; k += MATRIX_K) {
            // Within the loop, lest a compiler moves the loads behind it, to where they are used.
            if (k == 0u) {
//#if RUNS
                // Behind the last one it stays.
                let further = k0 + TILE_K < k_last;
                let x_turn = select(0u, K_UNITS, further);
//#if W_ROWS
                let w_turn = x_turn;
//#else
                let w_turn = select(0u, TILE_K * w_stride(), further);
//#endif
                w_from += w_turn;
                x_from += x_turn;
                //#unroll i W_UNITS: w_$i = raw_w(w_from + $iu * W_STEP * w_stride());
                //#unroll i X_UNITS: x_$i = raw_x(x_from + $iu * X_STEP * x_stride());
//#else
                let next = next_tile(k0, k_last);
                //#unroll i W_UNITS: w_$i = raw_w(w_place(w_line + $iu * W_STEP, w_unit, c0, next));
                //#unroll i X_UNITS: x_$i = raw_tile_unit(m0 + x_row + $iu * X_STEP, next / 8u, x_unit);
//#endif
            }
            //#unroll i FRAGMENTS_M
                let left_$i = subgroupMatrixLoad<subgroup_matrix_left<Factor, MATRIX_K, MATRIX_M>, row_major>(&x_tile, (m + $iu * MATRIX_M) * X_STRIDE + k / VECTOR, X_STRIDE);
            //#end
//#if W_ROWS
            //#unroll j FRAGMENTS_N
                let right_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, col_major>(&w_tile, (n + $ju * MATRIX_N) * W_STRIDE + k / VECTOR, W_STRIDE);
            //#end
//#else
            //#unroll j FRAGMENTS_N
                let right_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, row_major>(&w_tile, k * W_STRIDE + (n + $ju * MATRIX_N) / VECTOR, W_STRIDE);
            //#end
//#endif
            //#unroll i FRAGMENTS_M, j FRAGMENTS_N
                sum_$i_$j = subgroupMatrixMultiplyAccumulate(left_$i, right_$j, sum_$i_$j);
            //#end
        }
        workgroupBarrier();
    }
//#if TERM
    // Of a reduction that is cut, the first part gets the term.
    if (is_first_part) {
        let scales = term_scales(index, m0, c0, exponent);
        //#unroll i FRAGMENTS_M, j FRAGMENTS_N
            sum_$i_$j = subgroupMatrixScalarMultiply(sum_$i_$j, y_factor() * scales.sums);
        //#end
        let last = layer_of(min(c0 + TILE_N, params.columns) - 1u);
        for (var layer = layer_of(c0); layer <= last; layer += 1u) {
            for (var first = 0u; first < TERM_PARTS * term_units(); first += K_UNITS) {
                put_term(index, m0, c0, layer, first, scales);
                workgroupBarrier();
//#if ROLLED
                // Behind the term's own a deep tile has zeros, most of it.
                let term_end = min(TILE_K, 8u * (TERM_PARTS * term_units() - first));
//#else
                const term_end = TILE_K;
//#endif
                for (var k = 0u; k < term_end; k += MATRIX_K) {
                    //#unroll i FRAGMENTS_M
                        let left_$i = subgroupMatrixLoad<subgroup_matrix_left<Factor, MATRIX_K, MATRIX_M>, row_major>(&x_tile, (m + $iu * MATRIX_M) * X_STRIDE + k / VECTOR, X_STRIDE);
                    //#end
//#if W_ROWS
                    //#unroll j FRAGMENTS_N
                        let right_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, col_major>(&w_tile, (n + $ju * MATRIX_N) * W_STRIDE + k / VECTOR, W_STRIDE);
                    //#end
//#else
                    //#unroll j FRAGMENTS_N
                        let right_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, row_major>(&w_tile, k * W_STRIDE + (n + $ju * MATRIX_N) / VECTOR, W_STRIDE);
                    //#end
//#endif
                    //#unroll i FRAGMENTS_M, j FRAGMENTS_N
                        sum_$i_$j = subgroupMatrixMultiplyAccumulate(left_$i, right_$j, sum_$i_$j);
                    //#end
                }
                workgroupBarrier();
            }
        }
        y_scale = scales.results;
    }
//#endif
//#if saturated
    if (beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
//#if DIRECT
    if ((LOADS || !ACCUMULATE) && is_whole(m0, c0)) {
        //#unroll i FRAGMENTS_M, j FRAGMENTS_N
            subgroupMatrixStore<row_major>(&y, y_place(m0 + m + $iu * MATRIX_M, c0 + n + $ju * MATRIX_N, k_first), subgroupMatrixScalarMultiply(sum_$i_$j, y_scale), y_stride());
        //#end
        return;
    }
//#endif
    //#unroll i FRAGMENTS_M, j FRAGMENTS_N
        subgroupMatrixStore<row_major>(&results, group * (RESULTS / 4u), sum_$i_$j, MATRIX_N / 4u);
        workgroupBarrier();
        finish_fragment(lane, group * (RESULTS / 4u), m0 + m + $iu * MATRIX_M, c0 + n + $ju * MATRIX_N, y_scale);
        workgroupBarrier();
    //#end
}

// Stores one product's results from workgroup memory, four neighbours at a time.
fn finish_fragment(lane: u32, first: u32, m: u32, c: u32, y_scale: f32) {
    for (var i = lane; i < RESULTS / 4u; i += SUBGROUP_SIZE) {
        finish4(m + i / (MATRIX_N / 4u), c + i % (MATRIX_N / 4u) * 4u, results[first + i] * y_scale);
    }
}
