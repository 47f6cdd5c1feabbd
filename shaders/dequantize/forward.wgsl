// w[n, k] = quant_map[code] · scale(block) (+ minimum(block), or · last factor), or with ZEROS
// (quant_map[code] + minimum(block)) · scale(block),  rows row0 .. row0 + rows - 1 of a quantized matrix.
//
// Element e = (row0 + n)·in_features + k of the flat matrix: byte e/2 of codes, the high nibble if
// e is even, or with EIGHT_BITS byte e; block e / blocksize, or with TILES that of (row, column).
// w (rows, in_features) is overwritten from unit w_unit0 on, padded with zeros to units of eight; ALIGNED where
// in_features and blocks are multiples of eight, so that eight elements share a block.
// With EXPERTS several matrices of expert_rows rows lie one below the other, each with codes,
// scales and maps of its own, *_expert elements apart. With GROUP up to three of any rows do, which
// begin at the first unit, at unit1 and at unit2 of w. All share quant_map, the first's.
// Launcher: kernels/dequantize.py.
//#include common/flat.wgsl
//#include common/block_scale.wgsl
//#include common/decoded_eight.wgsl

//#if GROUP
struct Params {
    rows: u32, //= w.rows
    stride: u32, //= w.stride
    unit1: u32,
    unit2: u32,
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
    rows: u32,
    in_features: u32,
    stride: u32, //= w.stride
    row0: u32,
    expert_rows: u32,
    w_unit0: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#endif
//#output 5 w: 8

fn value_of(code: u32) -> f32 {
    return quant_value(code);
}

// The block of an element, by its place in the matrix.
fn block_of(element: u32) -> u32 {
//#if TILES
    let across = (params.in_features - 1u) / BLOCKSIZE + 1u;
    return element / params.in_features / TILE_ROWS * across + element % params.in_features / BLOCKSIZE;
//#else
    return element / BLOCKSIZE;
//#endif
}

//#if ALIGNED
// Rows follow each other without a gap, in w as in the codes.
fn each(i: u32) {
    if (i >= params.rows * params.stride) {
        return;
    }
//#if GROUP
    let expert = u32(i >= params.unit1) + u32(i >= params.unit2);
    let unit = i - part_of(expert, 0u, params.unit1, params.unit2);
    let w_unit = i;
//#else
    let w_unit = params.w_unit0 + i;
//#if EXPERTS
    let expert_units = params.expert_rows * params.stride;
    let expert = i / expert_units;
    let unit = i % expert_units;
//#else
    let expert = 0u;
    let unit = params.row0 * params.stride + i;
//#endif
//#endif
//#if TILES
    let block = block_of(8u * unit);
//#else
    let block = unit / (BLOCKSIZE / 8u);
//#endif
    let words = eight_codes(expert, unit);
    let scale = block_scale(expert, block);
    let minimum = block_minimum(expert, block);
    put(w_unit, decoded(words, scale, minimum));
}
//#else
fn value(expert: u32, element: u32) -> f32 {
//#if EIGHT_BITS
    let word = code_word(expert, element / 4u);
    let code = (word >> (8u * (element % 4u))) & 255u;
//#else
    let word = code_word(expert, element / 8u);
    let code = (word >> (4u * ((element % 8u) ^ 1u))) & 15u;
//#endif
    let block = block_of(element);
    return weights(vec4<f32>(quant_value(code)), block_scale(expert, block), block_minimum(expert, block)).x;
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
