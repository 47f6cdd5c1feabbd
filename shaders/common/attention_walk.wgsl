// What dk and dv need not look at.

// Whether all of `count` queries are of samples after those of the keys, the last of which is of
// key_segment.
fn is_past(row0: u32, query: u32, count: u32, key_segment: u32) -> bool {
    let begin = segments[row0 + query];
    let end = segments[row0 + min(query + count, params.seq) - 1u];
    return key_segment != 0u && begin > key_segment && end != 0u;
}
