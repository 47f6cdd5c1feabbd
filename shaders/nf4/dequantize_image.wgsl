// w[n, k] = quant_map[code] · scale(block): nf4/dequantize.wgsl for software adapters, where
// in_features and the block are multiples of 32.
//
// The block sizes are constants, since software adapters divide by others one lane after the other.
// Each invocation makes 32 neighbouring elements, which share a block. codes in words of 32 codes;
// With EXPERTS several matrices lie one below the other, as there. codebook: an image with the two values of each byte of codes. w is an image.
// Launcher: ops/nf4.py.
//#include common/flat.wgsl
//#include common/texel_values.wgsl

struct Params {
    count: u32,
    first: u32,
    expert_units: u32,
    codes_expert: u32,
    absmax_expert: u32,
    nested_expert: u32,
    maps_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(3) var codebook: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(5) var w: texture_storage_2d<rgba32uint, write>;
//#if DOUBLE_QUANT
@group(0) @binding(2) var<storage, read> absmax: array<u32>;
@group(0) @binding(4) var<storage, read> nested_absmax: array<f32>;
@group(0) @binding(6) var<storage, read> maps: array<f32>;

fn block_scale(expert: u32, block: u32) -> f32 {
    let code = (absmax[expert * params.absmax_expert + block / 4u] >> (8u * (block % 4u))) & 0xffu;
    let map = expert * params.maps_expert;
    return maps[map + 16u + code] * nested_absmax[expert * params.nested_expert + block / NESTED_BLOCKSIZE] + maps[map + 272u];
}
//#else
@group(0) @binding(2) var<storage, read> absmax: array<f32>;

fn block_scale(expert: u32, block: u32) -> f32 {
    return absmax[expert * params.absmax_expert + block];
}
//#endif

// The eight elements of a word: the high nibble of each byte comes first.
fn eight(word: u32, scale: f32) -> Eight {
    let a = textureLoad(codebook, vec2<u32>(word & 255u, 0u));
    let b = textureLoad(codebook, vec2<u32>((word >> 8u) & 255u, 0u));
    let c = textureLoad(codebook, vec2<u32>((word >> 16u) & 255u, 0u));
    let d = textureLoad(codebook, vec2<u32>(word >> 24u, 0u));
    return Eight(
        scale * bitcast<vec4<f32>>(vec4<u32>(a.x, b.x, c.x, d.x)),
        scale * bitcast<vec4<f32>>(vec4<u32>(a.y, b.y, c.y, d.y)),
    );
}

fn each(i: u32) {
    if (i >= params.count) {
        return;
    }
//#if EXPERTS
    let expert = i / params.expert_units;
    let unit = i % params.expert_units;
//#else
    let expert = 0u;
    let unit = params.first + i;
//#endif
    let words = codes[expert * params.codes_expert / 4u + unit];
    let scale = block_scale(expert, unit * 32u / BLOCKSIZE);
//#if BF16
    //#unroll j 4: textureStore(w, place(4u * i + $ju), to_texel(eight(words[$j], scale)));
//#else
    //#unroll j 4: let v_$j = eight(words[$j], scale); textureStore(w, place(8u * i + 2u * $ju), bitcast<vec4<u32>>(vec4<f32>(v_$j.even.x, v_$j.odd.x, v_$j.even.y, v_$j.odd.y))); textureStore(w, place(8u * i + 2u * $ju + 1u), bitcast<vec4<u32>>(vec4<f32>(v_$j.even.z, v_$j.odd.z, v_$j.even.w, v_$j.odd.w)));
//#endif
}
