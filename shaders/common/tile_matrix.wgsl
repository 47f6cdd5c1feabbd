// A workgroup's tile of a GEMM on matrix units: GROUPS_M × GROUPS_N subgroups with
// FRAGMENTS_M × FRAGMENTS_N products of MATRIX_M × MATRIX_N results each, factors in f16 (HALF) or
// float32, added up in float32. The same interface as tile_f32.wgsl.
//
// Tiles are stored 16 bytes at a time, and the next one's units are loaded while this one is
// multiplied. Whole tiles of float32 results go straight to y (DIRECT); what they are added to is
// where their sums begin, unless those are multiplied by something (LOADS).
//
// f16 ends at 65,504. Where `sizes` is bound, x is multiplied by a power of two that puts the
// largest of the workgroup's rows just below, and the results are divided by it; else what is
// beyond is held at 65,504 and counted in `saturated`, if that is bound. NaN stays NaN, and
// infinity infinity. An adapter's term (TERM) is more of the same product: tile_matrix_term.wgsl.
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

//#if sizes
@group(0) @binding(14) var<storage, read> sizes: array<u32>;
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

fn put_w(at: u32, v: Eight) {
//#if HALF
    w_tile[at] = f16_of_digits(v);
//#else
    w_tile[at] = low(v);
    w_tile[at + 1u] = high(v);
//#endif
}

// Where a unit of w lies that this workgroup needs.
fn w_place(unit: u32, c0: u32, k0: u32) -> u32 {
//#if W_ROWS
    return w_row(c0 + unit / K_UNITS) + k_unit(k0 / 8u + unit % K_UNITS);
//#else
    return w_columns(c0 + 8u * (unit % W_ROW_UNITS)) + w_row(k0 + unit / W_ROW_UNITS);
//#endif
}

//#if sizes
// The exponent, as float32 has it, of x's factor. 2¹⁴ is a power below f16's end, and leaves it
// room to round.
fn scale_exponent(m0: u32, k_first: u32) -> u32 {
    let blocks = (params.rows + SIZED_ROWS - 1u) / SIZED_ROWS;
    var largest = 0u;
    for (var i = m0 / SIZED_ROWS; i < (m0 + TILE_M + SIZED_ROWS - 1u) / SIZED_ROWS; i += 1u) {
//#if SIZED_PARTS
        largest = max(largest, sizes[k_first / params.k_part * blocks + min(i, blocks - 1u)]);
//#else
        largest = max(largest, sizes[min(i, blocks - 1u)]);
//#endif
    }
    // The bias is 127; the factor and its inverse stay normal.
    return u32(clamp(127 + 14 + 127 - i32(largest >> 23u), 1, 253));
}
//#endif

//#if TERM
//#include common/tile_matrix_term.wgsl
//#endif

fn product(index: u32, is_first_part: bool, group: u32, lane: u32, m0: u32, c0: u32, k_first: u32, k_last: u32) {
    let m = (group / GROUPS_N) * FRAGMENTS_M * MATRIX_M;
    let n = (group % GROUPS_N) * FRAGMENTS_N * MATRIX_N;
//#if sizes
    let exponent = scale_exponent(m0, k_first);
    let x_scale = bitcast<f32>(exponent << 23u);
    var y_scale = y_factor() * bitcast<f32>((254u - exponent) << 23u);
//#else
    let exponent = 127u;
    let x_scale = 1.0;
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
    //#unroll i X_UNITS
        let x_at_$i = index + $iu * THREADS;
        var x_$i = raw_unit(m0 + x_at_$i / K_UNITS, k_unit(k_first / 8u + x_at_$i % K_UNITS));
    //#end
    //#unroll i W_UNITS
        let w_at_$i = index + $iu * THREADS;
        var w_$i = raw_w(w_place(w_at_$i, c0, k_first));
    //#end
    for (var k0 = k_first; k0 < k_last; k0 += TILE_K) {
        //#unroll i X_UNITS
            if (X_UNITS * THREADS == X_COUNT || x_at_$i < X_COUNT) {
                let v = unpack_x(x_$i);
                put_x(x_at_$i / K_UNITS * X_STRIDE + x_at_$i % K_UNITS * (8u / VECTOR), scale8(v, x_scale * k_factor(k0 / 8u + x_at_$i % K_UNITS)));
//#if saturated
                if (c0 == 0u && m0 + x_at_$i / K_UNITS < row_count() && k0 / 8u + x_at_$i % K_UNITS < k_units()) { beyond += beyond8(v); }
//#endif
            }
        //#end
        //#unroll i W_UNITS
            if (W_UNITS * THREADS == W_COUNT || w_at_$i < W_COUNT) {
//#if HALF
                // Weights that are f16 already are copied.
                w_tile[w_at_$i / W_ROW_UNITS * W_STRIDE + w_at_$i % W_ROW_UNITS] = halves_w(w_$i);
//#if saturated
                if (m0 == 0u && c0 + w_at_$i / K_UNITS < params.columns && k0 / 8u + w_at_$i % K_UNITS < k_units()) { beyond += beyond_w(w_$i); }
//#endif
//#else
                put_w(w_at_$i / W_ROW_UNITS * W_STRIDE + w_at_$i % W_ROW_UNITS * (8u / VECTOR), unpack_w(w_$i));
//#endif
            }
        //#end
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k += MATRIX_K) {
            // Within the loop, lest a compiler moves the loads behind it, to where they are used.
            if (k == 0u) {
                //#unroll i X_UNITS: x_$i = raw_unit(m0 + x_at_$i / K_UNITS, k_unit((k0 + TILE_K) / 8u + x_at_$i % K_UNITS));
                //#unroll i W_UNITS: w_$i = raw_w(w_place(w_at_$i, c0, k0 + TILE_K));
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
                for (var k = 0u; k < TILE_K; k += MATRIX_K) {
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
