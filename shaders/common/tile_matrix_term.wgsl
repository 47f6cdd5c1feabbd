// An adapter's term u·bᵀ or u·a as further steps of a product on matrix units, behind all others.
//
// u and the adapter are float32, and f16 has half their digits. So each of their values is the sum
// of two of f16, and the term three products: high · high + low · high + high · low; what is left
// out is below 2⁻²² of it. Powers of two put the largest of the workgroup's u and of its part of the
// adapter below f16's end; the sums so far are multiplied by them, and the results divided.
//
// The including file has term_unit_x(m, layer, unit), and term_unit_w(column, unit) or, where w
// lies along the columns, term_unit_w(column, k).
//#if HALF
const TERM_PARTS = 3u;
const TERM_SLOTS = 16u; // so that few invocations meet at one

// The largest of u and of the adapter, float32's bits: in slots that invocations share, and in all.
var<workgroup> term_sizes: array<atomic<u32>, 2u * TERM_SLOTS>;
var<workgroup> term_largest: array<u32, 2>;
//#else
const TERM_PARTS = 1u;
//#endif

// What u and the adapter are multiplied by, the sums so far, and then the results.
struct TermScales {
    x: f32,
    w: f32,
    sums: f32,
    results: f32,
}

// How many units of eight the term is deep.
fn term_units() -> u32 {
    return (params.r + 7u) / 8u;
}
//#if HALF

fn clear_term_sizes(index: u32) {
    for (var i = index; i < 2u * TERM_SLOTS; i += THREADS) {
        atomicStore(&term_sizes[i], 0u);
    }
}

// The largest finite size of eight values, as its bits.
fn largest8(v: Eight) -> u32 {
    let even = sizes4(v.even);
    let odd = sizes4(v.odd);
    let infinite = vec4<u32>(INFINITE_BITS);
    let largest = max(select(even, vec4<u32>(0u), even >= infinite), select(odd, vec4<u32>(0u), odd >= infinite));
    return max(max(largest.x, largest.y), max(largest.z, largest.w));
}

// The power of two that puts the largest just below f16's end.
fn term_power(largest: u32) -> i32 {
    return clamp(127 + 14 - i32(largest >> 23u), -126, 126);
}

fn power(exponent: i32) -> f32 {
    return bitcast<f32>(u32(clamp(exponent, -126, 126) + 127) << 23u);
}

// exponent: that of x's factor, as float32 has it.
fn term_scales(index: u32, m0: u32, c0: u32, exponent: u32) -> TermScales {
    let units = term_units();
    var x_size = 0u;
    var w_size = 0u;
    let first = layer_of(c0);
    let layers = layer_of(min(c0 + TILE_N, params.columns) - 1u) - first + 1u;
    for (var i = index; i < TILE_M * layers * units; i += THREADS) {
        let row = m0 + i / (layers * units);
        let v = term_unit_x(row, first, i % (layers * units));
        x_size = max(x_size, select(0u, largest8(v), row < row_count()));
    }
//#if W_ROWS
    for (var i = index; i < TILE_N * units; i += THREADS) {
        w_size = max(w_size, largest8(term_unit_w(c0 + i / units, i % units)));
    }
//#else
    for (var i = index; i < params.r * W_ROW_UNITS; i += THREADS) {
        w_size = max(w_size, largest8(term_unit_w(c0 + 8u * (i % W_ROW_UNITS), i / W_ROW_UNITS)));
    }
//#endif
    atomicMax(&term_sizes[index % TERM_SLOTS], x_size);
    atomicMax(&term_sizes[TERM_SLOTS + index % TERM_SLOTS], w_size);
    workgroupBarrier();
    if (index < 2u) {
        var largest = 0u;
        for (var i = 0u; i < TERM_SLOTS; i += 1u) {
            largest = max(largest, atomicLoad(&term_sizes[index * TERM_SLOTS + i]));
        }
        term_largest[index] = largest;
    }
    // All invocations have the same, which what multiplies matrices insists on.
    let largest = workgroupUniformLoad(&term_largest);
    let w = term_power(largest[1]);
    // Where the term is far below the sums so far, it may lose digits, lest they overflow.
    let most = min(TERM_ROOM + i32(exponent) - 127, 126);
    let x = min(term_power(largest[0]), most - w);
    return TermScales(power(x), power(w), power(x + w + 127 - i32(exponent)), power(-x - w));
}

// By which power of two the sums so far may be multiplied: they are below 2⁴⁸.
const TERM_ROOM = 70;

// Eleven binary digits of each value, or the rest of them: both fit f16. What is no number stays
// none.
fn part8(v: Eight, rest: bool) -> Eight {
    return Eight(part4(v.even, rest), part4(v.odd, rest));
}

fn part4(v: vec4<f32>, rest: bool) -> vec4<f32> {
    let finite = sizes4(v) < vec4<u32>(INFINITE_BITS);
    let high = select(v, eleven_digits(v), finite);
    return select(high, v - high, rest);
}
//#else

fn clear_term_sizes(index: u32) {
}

fn term_scales(index: u32, m0: u32, c0: u32, exponent: u32) -> TermScales {
    return TermScales(1.0, 1.0, 1.0, 1.0);
}

fn part8(v: Eight, rest: bool) -> Eight {
    return v;
}
//#endif

// Fills the tiles with K_UNITS units of the term's from the first one on, of one layer's columns.
fn put_term(index: u32, m0: u32, c0: u32, layer: u32, first: u32, scales: TermScales) {
    let units = term_units();
    for (var i = index; i < X_COUNT; i += THREADS) {
        let unit = first + i % K_UNITS;
        let v = scale8(term_unit_x(m0 + i / K_UNITS, layer, unit % units), select(0.0, scales.x, unit < TERM_PARTS * units));
        put_x(i / K_UNITS * X_STRIDE + i % K_UNITS * (8u / VECTOR), part8(v, unit / units == 1u));
    }
    for (var i = index; i < W_COUNT; i += THREADS) {
//#if W_ROWS
        let unit = first + i % K_UNITS;
        let column = c0 + i / K_UNITS;
        let v = scale8(term_unit_w(column, unit % units), select(0.0, scales.w, layer_of(column) == layer));
//#else
        let k = i / W_ROW_UNITS;
        let unit = first + k / 8u;
        let v = scale8(term_unit_w(c0 + 8u * (i % W_ROW_UNITS), 8u * (unit % units) + k % 8u), scales.w);
//#endif
        put_w(i / W_ROW_UNITS * W_STRIDE + i % W_ROW_UNITS * (8u / VECTOR), part8(v, unit / units == 2u));
    }
}
