// A workgroup's tile of a GEMM on matrix units: GROUPS_M × GROUPS_N subgroups with
// FRAGMENTS_M × FRAGMENTS_N products of MATRIX_M × MATRIX_N results each, factors in f16 (HALF) or
// float32, added up in float32. The same interface as tile_f32.wgsl.
//
// f16 ends at 65,504. Where `sizes` is bound, x is multiplied by a power of two that puts the
// largest of the workgroup's rows just below, and the results are divided by it; else what is
// beyond is held at 65,504 and counted in `saturated`, if that is bound. NaN stays NaN, and
// infinity infinity.
const TILE_M = GROUPS_M * FRAGMENTS_M * MATRIX_M;
const TILE_N = GROUPS_N * FRAGMENTS_N * MATRIX_N;
const THREADS = GROUPS_M * GROUPS_N * SUBGROUP_SIZE;
const RESULTS = MATRIX_M * MATRIX_N;
const X_STRIDE = TILE_K + PADDING;
//#if W_ROWS
const W_STRIDE = TILE_K + PADDING;
const W_HEIGHT = TILE_N;
//#else
const W_STRIDE = TILE_N + PADDING;
const W_HEIGHT = TILE_K;
//#endif

//#if HALF
alias Factor = f16;
//#else
alias Factor = f32;
//#endif

//#if sizes
@group(0) @binding(10) var<storage, read> sizes: array<u32>;
//#endif
//#if saturated
@group(0) @binding(11) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif

var<workgroup> x_tile: array<Factor, TILE_M * X_STRIDE>;
var<workgroup> w_tile: array<Factor, W_HEIGHT * W_STRIDE>;
var<workgroup> results: array<f32, GROUPS_M * GROUPS_N * RESULTS>;

// Values of x and of w that this invocation held at 65,504, repeated rows not counted.
var<private> x_beyond: u32;
var<private> w_beyond: u32;
var<private> first_row: u32;
var<private> first_column: u32;
var<private> x_scale: f32 = 1.0;
var<private> y_scale: f32 = 1.0;

//#if HALF
const LARGEST = 65504.0;
const LARGEST_BITS = 0x477fe000u;
const INFINITE_BITS = 0x7f800000u;

fn sizes4(v: vec4<f32>) -> vec4<u32> {
    return bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
}

fn factor4(v: vec4<f32>) -> vec4<f16> {
    let size = sizes4(v);
    if (max(max(size.x, size.y), max(size.z, size.w)) > LARGEST_BITS) {
        return beyond4(v);
    }
    return vec4<f16>(v);
}

fn beyond4(v: vec4<f32>) -> vec4<f16> {
    let size = sizes4(v);
    let held = vec4<f16>(clamp(v, vec4<f32>(-LARGEST), vec4<f32>(LARGEST)));
    // A conversion need not make infinities and NaN: their bits do.
    let sign = (bitcast<vec4<u32>>(v) >> vec4<u32>(16u)) & vec4<u32>(0x8000u);
    let h = sign | select(vec4<u32>(0x7c00u), vec4<u32>(0x7e00u), size > vec4<u32>(INFINITE_BITS));
    let other = bitcast<vec4<f16>>(vec2<u32>(h.x | (h.y << 16u), h.z | (h.w << 16u)));
    return select(other, held, size < vec4<u32>(INFINITE_BITS));
}

// How many of four values are finite and beyond f16.
fn count_beyond(v: vec4<f32>) -> u32 {
    let size = sizes4(v);
    let beyond = (size > vec4<u32>(LARGEST_BITS)) & (size < vec4<u32>(INFINITE_BITS));
    let ones = select(vec4<u32>(0u), vec4<u32>(1u), beyond);
    return ones.x + ones.y + ones.z + ones.w;
}
//#else
fn factor4(v: vec4<f32>) -> vec4<f32> {
    return v;
}

fn count_beyond(v: vec4<f32>) -> u32 {
    return 0u;
}
//#endif

fn put_x(m: u32, k: u32, v: Eight) {
    let at = m * X_STRIDE + k;
    let e = factor4(v.even * x_scale);
    let o = factor4(v.odd * x_scale);
//#if saturated
    if (first_row + m < row_count()) {
        x_beyond += count_beyond(v.even) + count_beyond(v.odd);
    }
//#endif
    //#unroll i 4: x_tile[at + 2u * $iu] = e[$iu]; x_tile[at + 2u * $iu + 1u] = o[$iu];
}

fn put_w(at: u32, v: Eight) {
    let e = factor4(v.even);
    let o = factor4(v.odd);
    //#unroll i 4: w_tile[at + 2u * $iu] = e[$iu]; w_tile[at + 2u * $iu + 1u] = o[$iu];
}

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    for (var i = index; i < TILE_M * TILE_K / 8u; i += THREADS) {
        let m = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let v = load_x(x_row(m0 + m) + k_unit(k0 / 8u + unit));
        put_x(m, 8u * unit, scale8(v, k_factor(k0 / 8u + unit)));
    }
    for (var i = index; i < TILE_N * TILE_K / 8u; i += THREADS) {
//#if W_ROWS
        let n = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        put_w_row(n, 8u * unit, load_w(w_row(c0 + n) + k_unit(k0 / 8u + unit)));
//#else
        let k = i / (TILE_N / 8u);
        let unit = i % (TILE_N / 8u);
        put_w(k * W_STRIDE + 8u * unit, load_w(w_columns(c0 + 8u * unit) + w_row(k0 + k)));
//#endif
    }
}

//#if W_ROWS
fn put_w_row(n: u32, k: u32, v: Eight) {
//#if saturated
    if (first_column + n < params.columns) {
        w_beyond += count_beyond(v.even) + count_beyond(v.odd);
    }
//#endif
    put_w(n * W_STRIDE + k, v);
}
//#endif

// Looks up the rows' sizes: 2¹⁴ is a power below f16's end, and leaves it room to round.
fn choose_scale(m0: u32) {
//#if sizes
    var largest = 0u;
    for (var i = m0 / SIZED_ROWS; i < (m0 + TILE_M + SIZED_ROWS - 1u) / SIZED_ROWS; i += 1u) {
        largest = max(largest, sizes[min(i, arrayLength(&sizes) - 1u)]);
    }
    // Exponents of float32, whose bias is 127; a scale and its inverse stay normal.
    let exponent = clamp(127 + 14 + 127 - i32(largest >> 23u), 1, 253);
    x_scale = bitcast<f32>(u32(exponent) << 23u);
    y_scale = bitcast<f32>(u32(254 - exponent) << 23u);
//#endif
}

fn product(index: u32, group: u32, lane: u32, m0: u32, c0: u32, k_first: u32, k_last: u32) {
    let m = (group / GROUPS_N) * FRAGMENTS_M * MATRIX_M;
    let n = (group % GROUPS_N) * FRAGMENTS_N * MATRIX_N;
    first_row = m0;
    first_column = c0;
    choose_scale(m0);
    //#unroll i FRAGMENTS_M, j FRAGMENTS_N
        var sum_$i_$j: subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;
    //#end
    for (var k0 = k_first; k0 < k_last; k0 += TILE_K) {
        load_tiles(index, m0, c0, k0);
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k += MATRIX_K) {
            //#unroll i FRAGMENTS_M
                let x_$i = subgroupMatrixLoad<subgroup_matrix_left<Factor, MATRIX_K, MATRIX_M>, row_major>(&x_tile, (m + $iu * MATRIX_M) * X_STRIDE + k, X_STRIDE);
            //#end
//#if W_ROWS
            //#unroll j FRAGMENTS_N
                let w_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, col_major>(&w_tile, (n + $ju * MATRIX_N) * W_STRIDE + k, W_STRIDE);
            //#end
//#else
            //#unroll j FRAGMENTS_N
                let w_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, MATRIX_N, MATRIX_K>, row_major>(&w_tile, k * W_STRIDE + n + $ju * MATRIX_N, W_STRIDE);
            //#end
//#endif
            //#unroll i FRAGMENTS_M, j FRAGMENTS_N
                sum_$i_$j = subgroupMatrixMultiplyAccumulate(x_$i, w_$j, sum_$i_$j);
            //#end
        }
        workgroupBarrier();
    }
//#if saturated
    // Each value once, though many workgroups have it.
    let beyond = select(0u, x_beyond, c0 == 0u) + select(0u, w_beyond, m0 == 0u);
    if (beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
    //#unroll i FRAGMENTS_M, j FRAGMENTS_N
        subgroupMatrixStore<row_major>(&results, group * RESULTS, sum_$i_$j, MATRIX_N);
        workgroupBarrier();
        finish_fragment(lane, group * RESULTS, m0 + m + $iu * MATRIX_M, c0 + n + $ju * MATRIX_N);
        workgroupBarrier();
    //#end
}

// Stores one product's results from workgroup memory, four neighbours at a time.
fn finish_fragment(lane: u32, from_: u32, m: u32, c: u32) {
    for (var i = lane; i < RESULTS / 4u; i += SUBGROUP_SIZE) {
        let at = from_ + 4u * i;
        let v = vec4<f32>(results[at], results[at + 1u], results[at + 2u], results[at + 3u]);
        finish4(m + i / (MATRIX_N / 4u), c + i % (MATRIX_N / 4u) * 4u, v * y_scale);
    }
}
