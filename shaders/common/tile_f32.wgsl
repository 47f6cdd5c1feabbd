// A workgroup's tile of a GEMM in float32: 8·WG_M rows by 8·WG_N columns of results, WG_M · WG_N
// invocations with 8 × 8 each, operands passing through workgroup memory TILE_K deep.
const TILE_K = 16u;
const TILE_M = 8u * WG_M;
const TILE_N = 8u * WG_N;
const THREADS = WG_M * WG_N;

// Both tiles lie k by k, so that neighbouring invocations read neighbouring units.
var<workgroup> x_tile: array<vec4<f32>, TILE_K * 2u * WG_M>;
var<workgroup> w_tile: array<vec4<f32>, TILE_K * 2u * WG_N>;

// Eight values of x along k, from a multiple of eight on.
fn put_x(m: u32, k: u32, v: Eight) {
    let at = k * 2u * WG_M + m / 4u;
    let part = m % 4u;
    x_tile[at][part] = v.even.x;
    x_tile[at + 2u * WG_M][part] = v.odd.x;
    x_tile[at + 4u * WG_M][part] = v.even.y;
    x_tile[at + 6u * WG_M][part] = v.odd.y;
    x_tile[at + 8u * WG_M][part] = v.even.z;
    x_tile[at + 10u * WG_M][part] = v.odd.z;
    x_tile[at + 12u * WG_M][part] = v.even.w;
    x_tile[at + 14u * WG_M][part] = v.odd.w;
}

// Eight values of w along k, all of column n of the results.
fn put_w_row(n: u32, k: u32, v: Eight) {
    let at = k * 2u * WG_N + n / 4u;
    let part = n % 4u;
    w_tile[at][part] = v.even.x;
    w_tile[at + 2u * WG_N][part] = v.odd.x;
    w_tile[at + 4u * WG_N][part] = v.even.y;
    w_tile[at + 6u * WG_N][part] = v.odd.y;
    w_tile[at + 8u * WG_N][part] = v.even.z;
    w_tile[at + 10u * WG_N][part] = v.odd.z;
    w_tile[at + 12u * WG_N][part] = v.even.w;
    w_tile[at + 14u * WG_N][part] = v.odd.w;
}

// Eight values of w along the columns of the results, all of one k.
fn put_w_column(k: u32, n: u32, v: Eight) {
    let at = k * 2u * WG_N + n / 4u;
    w_tile[at] = low(v);
    w_tile[at + 1u] = high(v);
}

fn product(index: u32, m0: u32, c0: u32, k_first: u32, k_last: u32) {
    let across = index % WG_N;
    let down = index / WG_N;
    //#unroll i 8: var lo_$i = vec4<f32>(0.0); var hi_$i = vec4<f32>(0.0);
    for (var k0 = k_first; k0 < k_last; k0 += TILE_K) {
        load_tiles(index, m0, c0, k0);
        workgroupBarrier();
        for (var k = 0u; k < TILE_K; k += 1u) {
            let x_lo = x_tile[k * 2u * WG_M + down];
            let x_hi = x_tile[k * 2u * WG_M + WG_M + down];
            let w_lo = w_tile[k * 2u * WG_N + across];
            let w_hi = w_tile[k * 2u * WG_N + WG_N + across];
            //#unroll i 4: lo_$i += x_lo[$iu] * w_lo; hi_$i += x_lo[$iu] * w_hi;
            lo_4 += x_hi.x * w_lo; hi_4 += x_hi.x * w_hi;
            lo_5 += x_hi.y * w_lo; hi_5 += x_hi.y * w_hi;
            lo_6 += x_hi.z * w_lo; hi_6 += x_hi.z * w_hi;
            lo_7 += x_hi.w * w_lo; hi_7 += x_hi.w * w_hi;
        }
        workgroupBarrier();
    }
    let m = m0 + 4u * down;
    let c = c0 + 4u * across;
    //#unroll i 4: finish4(m + $iu, c, lo_$i); finish4(m + $iu, c + 4u * WG_N, hi_$i);
    finish4(m + 4u * WG_M, c, lo_4); finish4(m + 4u * WG_M, c + 4u * WG_N, hi_4);
    finish4(m + 4u * WG_M + 1u, c, lo_5); finish4(m + 4u * WG_M + 1u, c + 4u * WG_N, hi_5);
    finish4(m + 4u * WG_M + 2u, c, lo_6); finish4(m + 4u * WG_M + 2u, c + 4u * WG_N, hi_6);
    finish4(m + 4u * WG_M + 3u, c, lo_7); finish4(m + 4u * WG_M + 3u, c + 4u * WG_N, hi_7);
}
