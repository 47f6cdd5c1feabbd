// Which keys queries see, four at a time.

// Of four rows from row on.
fn segments_of(row0: u32, row: u32) -> vec4<u32> {
    let last = row0 + params.seq - 1u;
    let at = row0 + row;
    return vec4<u32>(segments[min(at, last)], segments[min(at + 1u, last)], segments[min(at + 2u, last)], segments[min(at + 3u, last)]);
}

fn sees(query: vec4<u32>, key: vec4<u32>, query_segment: vec4<u32>, key_segment: vec4<u32>) -> vec4<bool> {
    let near = (query < vec4<u32>(params.seq)) & (key <= query) & (query - key < vec4<u32>(params.window));
    let alike = (query_segment == vec4<u32>(0u)) | (query_segment == key_segment);
    return near & alike & (key_segment != vec4<u32>(0u));
}

fn four_from(row: u32) -> vec4<u32> {
    return vec4<u32>(row, row + 1u, row + 2u, row + 3u);
}
