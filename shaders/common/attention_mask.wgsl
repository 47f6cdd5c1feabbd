// Which keys a query sees. segments: per row of the batch, 0 for padding, else one more than where
// its sample begins within the row. A key is seen if it is not padding, not later than the query,
// fewer than params.window before it, and of the query's sample; a query that is itself padding
// sees all such keys, as in Hugging Face's masks.
//#if SOFTCAP
//#include common/tanh.wgsl
//#endif

fn visible(query: u32, key: u32, query_segment: u32, key_segment: u32) -> bool {
    return key <= query && query - key < params.window && key_segment != 0u && (query_segment == 0u || query_segment == key_segment);
}

// The first key that any query from this one on sees.
fn first_key(query: u32) -> u32 {
    return query - min(query, params.window - 1u);
}

// Where the first sample begins that any of these queries, first to last of one row, sees; 0 where
// one is padding and sees everything.
fn sample_begin(row0: u32, first: u32, last: u32) -> u32 {
    let segment = segments[row0 + first];
    return select(0u, segment - 1u, segment != 0u && segments[row0 + last] != 0u);
}

// Past the last query that sees any key up to this one.
fn last_query(key: u32) -> u32 {
    return min(params.seq, key + min(params.seq, params.window));
}
