// w[n, k] = quant_map[code] · scale(block) (+ minimum(block)): dequantize/forward.wgsl for software
// adapters and codes of 4 bits, where in_features and the block are multiples of 32. Each invocation makes 32 neighbouring elements,
// which share a block. codes in words of 32 codes; codebook: the two values of each byte of codes.
// Launcher: kernels/dequantize.py.
//#include common/flat.wgsl
//#include common/block_scale.wgsl

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
//#input 3 codebook: 4 float32 texture
//#output 5 w: 8

// The eight elements of a word: the high nibble of each byte comes first.
fn eight_codes(word: u32, scale: f32, minimum: f32) -> Eight {
    let a = load_codebook(word & 255u);
    let b = load_codebook((word >> 8u) & 255u);
    let c = load_codebook((word >> 16u) & 255u);
    let d = load_codebook(word >> 24u);
    let even = vec4<f32>(a.x, b.x, c.x, d.x);
    let odd = vec4<f32>(a.y, b.y, c.y, d.y);
    return Eight(weights(even, scale, minimum), weights(odd, scale, minimum));
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
    let block = unit * 32u / BLOCKSIZE;
    let scale = block_scale(expert, block);
    let minimum = block_minimum(expert, block);
    //#unroll j 4: store_w(4u * i + $ju, eight_codes(words[$j], scale, minimum));
}
