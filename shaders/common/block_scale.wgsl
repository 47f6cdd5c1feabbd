// The scale of a block of a quantized matrix: absmax[block], or doubly quantized (NESTED)
// nested_map[absmax_code] · nested_absmax[block / nested_blocksize] (+ nested_offset).
// With MINIMA each is followed by the block's minimum, stored likewise: block becomes 2 · block;
// with ZEROS that is added before the scale multiplies.
// maps: the values of quant_map, then the 256 of nested_map and nested_offset, or the last factor.
// Of several matrices `expert` is the number of one. With GROUP there are up to three, all in one
// range of words `group`, in vectors of four with FOURS, and params says where the parts of each begin;
// with EXPERTS, too, parts are *_expert words apart.
//#if GROUP
//#if FOURS
@group(0) @binding(9) var<storage, read> group: array<vec4<u32>>;

fn word_at(i: u32) -> u32 {
    return group[i / 4u][i % 4u];
}
//#else
@group(0) @binding(9) var<storage, read> group: array<u32>;

fn word_at(i: u32) -> u32 {
    return group[i];
}
//#endif

fn part_of(matrix: u32, first: u32, second: u32, third: u32) -> u32 {
    return select(select(first, second, matrix == 1u), third, matrix == 2u);
}

//#if EXPERTS
fn begin_of(matrix: u32, first: u32, second: u32, third: u32, stride: u32) -> u32 {
    return first + matrix * stride;
}
//#else
fn begin_of(matrix: u32, first: u32, second: u32, third: u32, stride: u32) -> u32 {
    return part_of(matrix, first, second, third);
}
//#endif

fn codes_begin(matrix: u32) -> u32 {
    return begin_of(matrix, params.codes0, params.codes1, params.codes2, params.codes_expert);
}

fn code_word(matrix: u32, i: u32) -> u32 {
    return word_at(codes_begin(matrix) + i);
}

fn absmax_word(matrix: u32, i: u32) -> u32 {
    return word_at(begin_of(matrix, params.absmax0, params.absmax1, params.absmax2, params.absmax_expert) + i);
}

fn absmax_value(matrix: u32, i: u32) -> f32 {
    return bitcast<f32>(absmax_word(matrix, i));
}

fn nested_value(matrix: u32, i: u32) -> f32 {
    return bitcast<f32>(word_at(begin_of(matrix, params.nested0, params.nested1, params.nested2, params.nested_expert) + i));
}

fn map_value(matrix: u32, i: u32) -> f32 {
    return bitcast<f32>(word_at(begin_of(matrix, params.maps0, params.maps1, params.maps2, params.maps_expert) + i));
}

fn quant_value(code: u32) -> f32 {
    return bitcast<f32>(word_at(params.maps0 + code));
}
//#else
//#if NESTED
@group(0) @binding(2) var<storage, read> absmax: array<u32>;
@group(0) @binding(4) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(6) var<storage, read> maps: array<f32>;

fn absmax_word(expert: u32, i: u32) -> u32 {
    return absmax[expert * params.absmax_expert + i];
}

fn nested_value(expert: u32, i: u32) -> f32 {
    return nested_absmax[expert * params.nested_expert + i];
}

fn map_value(expert: u32, i: u32) -> f32 {
    return maps[expert * params.maps_expert + i];
}
//#else
@group(0) @binding(2) var<storage, read> absmax: array<f32>;

fn absmax_value(expert: u32, i: u32) -> f32 {
    return absmax[expert * params.absmax_expert + i];
}
//#endif
//#endif

//#if NESTED
fn stored(expert: u32, at: u32, nested: u32) -> f32 {
    let code = (absmax_word(expert, at / 4u) >> (8u * (at % 4u))) & 0xffu;
//#if OFFSET
    return map_value(expert, VALUES + code) * nested_value(expert, nested) + map_value(expert, VALUES + 256u);
//#else
    return map_value(expert, VALUES + code) * nested_value(expert, nested);
//#endif
}
//#else
fn stored(expert: u32, at: u32, nested: u32) -> f32 {
    return absmax_value(expert, at);
}
//#endif

//#if MINIMA
fn block_scale(expert: u32, block: u32) -> f32 {
    return stored(expert, 2u * block, 2u * (block / NESTED_BLOCKSIZE));
}

fn block_minimum(expert: u32, block: u32) -> f32 {
    return stored(expert, 2u * block + 1u, 2u * (block / NESTED_BLOCKSIZE) + 1u);
}
//#else
fn block_scale(expert: u32, block: u32) -> f32 {
    return stored(expert, block, block / NESTED_BLOCKSIZE);
}

fn block_minimum(expert: u32, block: u32) -> f32 {
    return 0.0;
}
//#endif

// What codes with these values stand for. The minimum is read where there is one.
fn weights(values: vec4<f32>, scale: f32, minimum: f32) -> vec4<f32> {
//#if ZEROS
    return (values + minimum) * scale;
//#else
//#if MINIMA
    return values * scale + minimum;
//#else
//#if TWO_FACTORS
    // Read, not a constant, which drivers would multiply one of the others by.
    return values * scale * quant_value(VALUES + 256u);
//#else
    return values * scale;
//#endif
//#endif
//#endif
}
