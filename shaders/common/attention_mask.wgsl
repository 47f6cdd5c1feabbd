// Which keys a query sees. segments: per row of the batch, 0 for padding, else the number of the
// sample. A key is seen if it is not padding, not later than the query, and of the query's
// sample; a query that is itself padding sees all earlier keys, as in Hugging Face's masks.

fn visible(query: u32, key: u32, query_segment: u32, key_segment: u32) -> bool {
    return key <= query && key_segment != 0u && (query_segment == 0u || query_segment == key_segment);
}
