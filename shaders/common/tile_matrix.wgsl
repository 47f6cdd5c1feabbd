// A workgroup's tile of a GEMM on matrix units: GROUPS_M × GROUPS_N subgroups with
// FRAGMENTS_M × FRAGMENTS_N products of MATRIX_M × MATRIX_N results each, f16 in, float32 added up.
// The same interface as tile_f32.wgsl. Operands are rounded from bfloat16 to f16 in the tile, x
// times X_SCALE, since gradients are small; what f16 cannot hold becomes its largest value, and NaN
// stays NaN.
const TILE_K = 2u * MATRIX_K;
const TILE_M = GROUPS_M * FRAGMENTS_M * MATRIX_M;
const TILE_N = GROUPS_N * FRAGMENTS_N * MATRIX_N;
const THREADS = GROUPS_M * GROUPS_N * SUBGROUP_SIZE;
const RESULTS = MATRIX_M * MATRIX_N;
// Eight more than needed, so that rows do not begin in the same bank of workgroup memory.
const X_STRIDE = TILE_K + 8u;
//#if W_ROWS
const W_STRIDE = TILE_K + 8u;
const W_HEIGHT = TILE_N;
//#else
const W_STRIDE = TILE_N + 8u;
const W_HEIGHT = TILE_K;
//#endif

var<workgroup> x_tile: array<f16, TILE_M * X_STRIDE>;
var<workgroup> w_tile: array<f16, W_HEIGHT * W_STRIDE>;
var<workgroup> results: array<f32, GROUPS_M * GROUPS_N * RESULTS>;

fn half4(v: vec4<f32>) -> vec4<f16> {
    let nan = (bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu)) > vec4<u32>(0x7f800000u);
    return select(vec4<f16>(clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0))), vec4<f16>(v), nan);
}

fn put_x(m: u32, k: u32, v: Eight) {
    let at = m * X_STRIDE + k;
    let e = half4(v.even * X_SCALE);
    let o = half4(v.odd * X_SCALE);
    //#unroll i 4: x_tile[at + 2u * $iu] = e[$iu]; x_tile[at + 2u * $iu + 1u] = o[$iu];
}

fn put_w(at: u32, v: Eight) {
    let e = half4(v.even);
    let o = half4(v.odd);
    //#unroll i 4: w_tile[at + 2u * $iu] = e[$iu]; w_tile[at + 2u * $iu + 1u] = o[$iu];
}

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    for (var i = index; i < TILE_M * TILE_K / 8u; i += THREADS) {
        let m = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        let v = unpack_x(raw_unit(m0 + m, k_unit(k0 / 8u + unit)));
        put_x(m, 8u * unit, scale8(v, k_factor(k0 / 8u + unit)));
    }
    for (var i = index; i < TILE_N * TILE_K / 8u; i += THREADS) {
//#if W_ROWS
        let n = i / (TILE_K / 8u);
        let unit = i % (TILE_K / 8u);
        put_w(n * W_STRIDE + 8u * unit, load_w(w_row(c0 + n) + k_unit(k0 / 8u + unit)));
//#else
        let k = i / (TILE_N / 8u);
        let unit = i % (TILE_N / 8u);
        put_w(k * W_STRIDE + 8u * unit, load_w(w_columns(c0 + 8u * unit) + w_row(k0 + k)));
//#endif
    }
}

fn product(index: u32, group: u32, lane: u32, m0: u32, c0: u32, k_first: u32, k_last: u32) {
    let m = (group / GROUPS_N) * FRAGMENTS_M * MATRIX_M;
    let n = (group % GROUPS_N) * FRAGMENTS_N * MATRIX_N;
    //#unroll i FRAGMENTS_M, j FRAGMENTS_N
        var sum_$i_$j: subgroup_matrix_result<f32, MATRIX_N, MATRIX_M>;
    //#end
    for (var k0 = k_first; k0 < k_last; k0 += TILE_K) {
        load_tiles(index, m0, c0, k0);
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k += MATRIX_K) {
            //#unroll i FRAGMENTS_M
                let x_$i = subgroupMatrixLoad<subgroup_matrix_left<f16, MATRIX_K, MATRIX_M>, row_major>(&x_tile, (m + $iu * MATRIX_M) * X_STRIDE + k, X_STRIDE);
            //#end
//#if W_ROWS
            //#unroll j FRAGMENTS_N
                let w_$j = subgroupMatrixLoad<subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>, col_major>(&w_tile, (n + $ju * MATRIX_N) * W_STRIDE + k, W_STRIDE);
            //#end
//#else
            //#unroll j FRAGMENTS_N
                let w_$j = subgroupMatrixLoad<subgroup_matrix_right<f16, MATRIX_N, MATRIX_K>, row_major>(&w_tile, k * W_STRIDE + n + $ju * MATRIX_N, W_STRIDE);
            //#end
//#endif
            //#unroll i FRAGMENTS_M, j FRAGMENTS_N
                sum_$i_$j = subgroupMatrixMultiplyAccumulate(x_$i, w_$j, sum_$i_$j);
            //#end
        }
        workgroupBarrier();
    }
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
        finish4(m + i / (MATRIX_N / 4u), c + i % (MATRIX_N / 4u) * 4u, v * (1.0 / X_SCALE));
    }
}
