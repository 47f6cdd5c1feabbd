// Which keys queries see, four at a time.

// Of four rows from row on.
fn segments_of(row0: u32, row: u32) -> vec4<u32> {
    let last = row0 + params.seq - 1u;
    let at = row0 + row;
    return vec4<u32>(segments[min(at, last)], segments[min(at + 1u, last)], segments[min(at + 2u, last)], segments[min(at + 3u, last)]);
}

//#if BLOCKS?
// The blocks of the own rows of a call of sees.
var<private> block_begins: vec4<u32>;
var<private> block_ends: vec4<u32>;

fn take_blocks(row0: u32, row: vec4<u32>) {
    //#unroll i 4: let block_$i = block_of_token(row0 + min(row[$i], params.seq - 1u));
    block_begins = vec4<u32>(block_0.x, block_1.x, block_2.x, block_3.x);
    block_ends = vec4<u32>(block_0.y, block_1.y, block_2.y, block_3.y);
}

//#endif
fn sees(query: vec4<u32>, key: vec4<u32>, query_segment: vec4<u32>, key_segment: vec4<u32>) -> vec4<bool> {
//#if BLOCKS?
    let later = (query >= block_begins) & (key < block_ends);
    let near = (query < vec4<u32>(params.seq)) & select(later, query - key < vec4<u32>(params.window), key <= query);
//#else
    let near = (query < vec4<u32>(params.seq)) & (key <= query) & (query - key < vec4<u32>(params.window));
//#endif
    let alike = (query_segment == vec4<u32>(0u)) | (query_segment == key_segment);
    return near & alike & (key_segment != vec4<u32>(0u));
}

fn four_from(row: u32) -> vec4<u32> {
    return vec4<u32>(row, row + 1u, row + 2u, row + 3u);
}
