// w[n, k] = quant_map[code] · scale(block),  rows row0 .. row0 + rows - 1 of an NF4 matrix.
//
// Element e = (row0 + n)·in_features + k of the flat matrix: byte e/2 of codes, the high nibble if
// e is even; block e / blocksize.
// w (rows, in_features) is overwritten from unit w_unit0 on, padded with zeros to units of eight; ALIGNED where
// in_features is a multiple of eight, so that eight elements share a word and a block.
// With EXPERTS several matrices of expert_rows rows lie one below the other, each with codes,
// scales and maps of its own, *_expert elements apart. All share quant_map, the first's.
// Launcher: kernels/dequantize.py.
//#include common/flat.wgsl
//#include common/nf4_scale.wgsl

struct Params {
    rows: u32,
    in_features: u32,
    stride: u32,
    row0: u32,
    expert_rows: u32,
    w_unit0: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> quant_map: array<f32>;
//#output 5 w: 8
//#if saturated
// Counts values that are finite and beyond float16's end, where they are held.
@group(0) @binding(7) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif

fn put(unit: u32, v: Eight) {
//#if saturated
    let beyond = beyond8(v);
    if (beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
    store_w(unit, v);
}

//#if ALIGNED
// The even elements' codes are the high nibbles of the bytes.
fn decoded(word: u32, scale: f32) -> Eight {
    let even = vec4<f32>(quant_map[(word >> 4u) & 15u], quant_map[(word >> 12u) & 15u], quant_map[(word >> 20u) & 15u], quant_map[word >> 28u]);
    let odd = vec4<f32>(quant_map[word & 15u], quant_map[(word >> 8u) & 15u], quant_map[(word >> 16u) & 15u], quant_map[(word >> 24u) & 15u]);
    return Eight(even * scale, odd * scale);
}

// Rows follow each other without a gap, in w as in the codes.
fn each(i: u32) {
    if (i >= params.rows * params.stride) {
        return;
    }
//#if EXPERTS
    let expert_units = params.expert_rows * params.stride;
    let expert = i / expert_units;
    let unit = i % expert_units;
//#else
    let expert = 0u;
    let unit = params.row0 * params.stride + i;
//#endif
    let word = codes[expert * params.codes_expert + unit];
    put(params.w_unit0 + i, decoded(word, block_scale(expert, unit / (BLOCKSIZE / 8u))));
}
//#else
fn value(expert: u32, element: u32) -> f32 {
    let word = codes[expert * params.codes_expert + element / 8u];
    let nibble = (element % 8u) ^ 1u;
    return quant_map[(word >> (4u * nibble)) & 15u] * block_scale(expert, element / BLOCKSIZE);
}

fn each(i: u32) {
    let n = i / params.stride;
    let k = 8u * (i % params.stride);
    if (n >= params.rows) {
        return;
    }
//#if EXPERTS
    let expert = n / params.expert_rows;
    let first = (n % params.expert_rows) * params.in_features + k;
//#else
    let expert = 0u;
    let first = (params.row0 + n) * params.in_features + k;
//#endif
    //#unroll e 8: var v_$e = 0.0; if (k + $eu < params.in_features) { v_$e = value(expert, first + $eu); }
    put(params.w_unit0 + i, Eight(vec4<f32>(v_0, v_2, v_4, v_6), vec4<f32>(v_1, v_3, v_5, v_7)));
}
//#endif
