// w[n, k] = quant_map[code] · scale(block),  rows row0 .. row0 + rows - 1 of an NF4 matrix.
//
// Element e = (row0 + n)·in_features + k of the flat matrix: byte e/2 of codes, the high nibble if
// e is even; block e / blocksize. scale = absmax[block], or doubly quantized (DOUBLE_QUANT)
// nested_map[absmax_code] · nested_absmax[block / nested_blocksize] + nested_offset.
// maps: the 16 values of quant_map, then the 256 of nested_map and nested_offset.
// w (rows, in_features) is overwritten, padded with zeros to units of eight; ALIGNED where
// in_features is a multiple of eight, so that eight elements share a word and a block.
// With EXPERTS several matrices of expert_rows rows lie one below the other, each with codes,
// scales and maps of its own, *_expert elements apart. All share quant_map, the first's.
// With IMAGE w is an image of texels instead of a buffer. Launcher: ops/nf4.py.
//#include common/flat.wgsl
//#include common/operand_out.wgsl OPERAND=w OPERAND_BINDING=5

struct Params {
    rows: u32,
    in_features: u32,
    stride: u32,
    row0: u32,
    blocksize: u32,
    nested_blocksize: u32,
    expert_rows: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<u32>;
@group(0) @binding(3) var<storage, read> maps: array<f32>;
//#if DOUBLE_QUANT
@group(0) @binding(2) var<storage, read> absmax: array<u32>;
@group(0) @binding(4) var<storage, read> nested_absmax: array<f32>;

fn block_scale(expert: u32, block: u32) -> f32 {
    let code = (absmax[expert * params.absmax_expert + block / 4u] >> (8u * (block % 4u))) & 0xffu;
    let map = expert * params.maps_expert;
    return maps[map + 16u + code] * nested_absmax[expert * params.nested_expert + block / params.nested_blocksize] + maps[map + 272u];
}
//#else
@group(0) @binding(2) var<storage, read> absmax: array<f32>;

fn block_scale(expert: u32, block: u32) -> f32 {
    return absmax[expert * params.absmax_expert + block];
}
//#endif

fn value(expert: u32, element: u32) -> f32 {
    let word = codes[expert * params.codes_expert + element / 8u];
    let nibble = (element % 8u) ^ 1u;
    return maps[(word >> (4u * nibble)) & 15u] * block_scale(expert, element / params.blocksize);
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
//#if ALIGNED
    let word = codes[expert * params.codes_expert + first / 8u];
    let scale = block_scale(expert, first / params.blocksize);
    let lo = vec4<f32>(maps[(word >> 4u) & 15u], maps[word & 15u], maps[(word >> 12u) & 15u], maps[(word >> 8u) & 15u]);
    let hi = vec4<f32>(maps[(word >> 20u) & 15u], maps[(word >> 16u) & 15u], maps[(word >> 28u) & 15u], maps[(word >> 24u) & 15u]);
    store_w(i, lo * scale, hi * scale);
//#else
    //#unroll e 8: var v_$e = 0.0; if (k + $eu < params.in_features) { v_$e = value(expert, first + $eu); }
    store_w(i, vec4<f32>(v_0, v_1, v_2, v_3), vec4<f32>(v_4, v_5, v_6, v_7));
//#endif
}
