// w[n, k] of dequantize/forward.wgsl, which has the formula, for GPUs: where eight neighbours, a
// unit, share a row and a block. A workgroup makes a tile of eight units an invocation. The values
// of codes and the scales of the tile's blocks come into workgroup memory once; neighbours take
// neighbouring units at a time, so that loads and stores are of whole lines.
//
// Scales tell whether no weight of a tile can be NaN or beyond float16's end. Where one may be, and
// in a tile that the matrix ends in, units are looked at one by one.
//
// Units are counted from the matrix's first; `first` is that of row0, the tiles of w begin there.
// SCALES blocks meet a tile; EVEN where tiles begin where blocks do, or lie within one. MOST: no
// code's value is larger. With EXPERTS the third dimension of the grid is the matrix, with GROUP
// tiles of the second and third begin at tile1 and tile2. Launcher: kernels/dequantize.py.
//#include common/block_scale.wgsl
//#include common/decoded_eight.wgsl

const TURNS = 8u;
const TILE = THREADS * TURNS;
const SMALL_BITS = 0x47000000u; // 32,768: roundings of a product and a sum stay below float16's end

//#if GROUP
struct Params {
    units: u32,
    unit1: u32,
    unit2: u32,
    tile1: u32,
    tile2: u32,
    codes0: u32,
    codes1: u32,
    codes2: u32,
    absmax0: u32,
    absmax1: u32,
    absmax2: u32,
    nested0: u32,
    nested1: u32,
    nested2: u32,
    maps0: u32,
    maps1: u32,
    maps2: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#else
struct Params {
    units: u32,
    first: u32,
    w_unit0: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#endif
//#output 5 w: 8

var<workgroup> values: array<f32, VALUES>;
var<workgroup> scales: array<f32, SCALES>;
//#if MINIMA
var<workgroup> minima: array<f32, SCALES>;
//#endif

fn value_of(code: u32) -> f32 {
    return values[code];
}

fn keep_scale(b: u32, scale: f32, minimum: f32) {
    scales[b] = scale;
//#if MINIMA
    minima[b] = minimum;
//#endif
}

fn minimum_of(b: u32) -> f32 {
//#if MINIMA
    return minima[b];
//#else
    return 0.0;
//#endif
}

// Which of the tile's blocks a unit is in. `skipped`: units of the first block before the tile.
fn block_within(skipped: u32, turn: u32, lane: u32) -> u32 {
    if (SCALES == 1u) {
        return 0u;
    }
    if (EVEN && THREADS % UNITS == 0u) {
        return turn * (THREADS / UNITS) + lane / UNITS;
    }
    return (skipped + turn * THREADS + lane) / UNITS;
}

// The bits of what no weight of a block exceeds: of NaN they are larger than any number's.
fn bound_bits(scale: f32, minimum: f32) -> u32 {
//#if ZEROS
    return bitcast<u32>(abs(scale) * (f32(MOST) + abs(minimum)));
//#else
    return bitcast<u32>(abs(scale) * f32(MOST) + abs(minimum));
//#endif
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let lane = local.x;
    let tile = group.y * groups.x + group.x;
//#if GROUP
    let matrix = u32(tile >= params.tile1) + u32(tile >= params.tile2);
    let first = 0u;
    let begin = (tile - part_of(matrix, 0u, params.tile1, params.tile2)) * TILE;
    let w_unit0 = part_of(matrix, 0u, params.unit1, params.unit2);
    let units = part_of(matrix, params.unit1, params.unit2, params.units) - w_unit0;
//#else
    let first = params.first;
    let begin = tile * TILE;
    let units = params.units;
//#if EXPERTS
    let matrix = group.z;
    let w_unit0 = params.w_unit0 + matrix * units;
//#else
    let matrix = 0u;
    let w_unit0 = params.w_unit0;
//#endif
//#endif
    if (begin >= units) {
        return;
    }
    let is_whole = begin + TILE <= units;
    // Under way before the barrier.
    //#unroll t 8: var words_$t: Codes;
    if (is_whole) {
        //#unroll t 8: words_$t = eight_codes(matrix, first + begin + $tu * THREADS + lane);
    }
    let block0 = (first + begin) / UNITS;
    let skipped = (first + begin) % UNITS;
    let last = (first + units - 1u) / UNITS;
    // Loads that wait for nothing, and stores behind them; most formats need no more than these.
    let value = quant_value(min(lane, VALUES - 1u));
    let block = min(block0 + lane, last);
    let scale = block_scale(matrix, block);
    let minimum = block_minimum(matrix, block);
    if (lane < VALUES) {
        values[lane] = value;
    }
    if (lane < SCALES) {
        keep_scale(lane, scale, minimum);
    }
    for (var v = lane + THREADS; VALUES > THREADS && v < VALUES; v += THREADS) {
        values[v] = quant_value(v);
    }
    for (var b = lane + THREADS; SCALES > THREADS && b < SCALES; b += THREADS) {
        let further = min(block0 + b, last);
        keep_scale(b, block_scale(matrix, further), block_minimum(matrix, further));
    }
    workgroupBarrier();
    if (is_whole) {
        //#unroll t 8: let b_$t = block_within(skipped, $tu, lane); let scale_$t = scales[b_$t]; let minimum_$t = minimum_of(b_$t);
        var bits = 0u;
        //#unroll t 8: bits = max(bits, bound_bits(scale_$t, minimum_$t));
        if (bits < SMALL_BITS) {
            //#unroll t 8: store_small_w(w_unit0 + begin + $tu * THREADS + lane, decoded(words_$t, scale_$t, minimum_$t));
            return;
        }
    }
    // Of turns that no compiler knows, or some write all of them out.
    let end = min(begin + TILE, units);
    for (var unit = begin + lane; unit < end; unit += THREADS) {
        let b = (skipped + unit - begin) / UNITS;
        put(w_unit0 + unit, decoded(eight_codes(matrix, first + unit), scales[b], minimum_of(b)));
    }
}
