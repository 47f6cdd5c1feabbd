// y = the float32 scales (with SECOND the minima) of the blocks of a quantized matrix in strips
// (kernels/gemm/packed.py): a texel has those of four columns, texels of LANES invocations lie together. Up
// to three matrices, one below the other, whose columns begin at begin1 and begin2; columns past the
// end get those of the last one. Launcher: kernels/gemm/packed.py.
//#include common/flat.wgsl

struct Params {
    columns: u32,
    units: u32,
    blocks: u32,
    count: u32,
    begin1: u32,
    begin2: u32,
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
//#output 2 y: words
//#include common/block_scale.wgsl
//#include common/block_at.wgsl

fn number_of(column: u32, block: u32) -> f32 {
    let matrix = u32(column >= params.begin1) + u32(column >= params.begin2);
    let row = column - part_of(matrix, 0u, params.begin1, params.begin2);
    let at = block_at(row, block * (BLOCKSIZE / 8u));
//#if SECOND
    return block_minimum(matrix, at);
//#else
//#if TWO_FACTORS
    return block_scale(matrix, at) * quant_value(VALUES + 256u);
//#else
    return block_scale(matrix, at);
//#endif
//#endif
}

fn each(i: u32) {
    if (i >= params.count) {
        return;
    }
    let strip = i / (params.blocks * LANES);
    let block = i / LANES % params.blocks;
    let column = 4u * (strip * LANES + i % LANES);
    var numbers = vec4<f32>(0.0);
    //#unroll j 4: numbers[$j] = number_of(min(column + $ju, params.columns - 1u), block);
    store_y(i, bitcast<vec4<u32>>(numbers));
}
