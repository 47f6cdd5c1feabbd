// What all of attention's kernels share: their sizes, which keys a query sees, scores.
//
// A workgroup takes BLOCK queries, or keys, of one head. segments: per row of the batch, 0 for
// padding, else one more than where its sample begins within the row. A key is seen if it is not
// padding, not later than the query, fewer than params.window before it, and of the query's sample;
// a query that is itself padding sees all such keys, as in Hugging Face's masks. With BLOCKS, a query
// also sees all later keys of its block: after all segments follow, per row of the batch, where its
// block begins and ends within the row. A block is of one sample; a token outside of all is a block by
// itself.
//#if SOFTCAP
//#include common/tanh.wgsl
//#endif

// Strides are counted in the units that the kernel reads heads in.
struct Params {
    rows: u32, //= q.rows
    seq: u32,
    heads: u32,
    group: u32,
    q_stride: u32,
    kv_stride: u32, //= k.stride
    window: u32,
    scale: f32,
    softcap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;

// Which block of which head a workgroup takes. All heads' longest walks begin first: the last one to
// begin would end long after the others.
fn block_of(id: vec3<u32>, count: vec3<u32>) -> vec3<u32> {
    let place = id.y * count.x + id.x;
    return vec3<u32>(place / count.y, place % count.y, id.z);
}

//#if SEGMENT_TEXELS
//#input 4 segments: words texture
//#else
@group(0) @binding(4) var<storage, read> segments: array<u32>;
//#endif

struct Keys {
    begin: u32,
    end: u32,
}

// The keys that any of the workgroup's queries, from first on, sees.
fn keys_of_block(row0: u32, first: u32) -> Keys {
    let end = min(params.seq, first + BLOCK);
    let in_window = first - min(first, params.window - 1u);
//#if BLOCKS?
    let begin = max(in_window, sample_begin(row0, first, end - 1u));
    // Blocks are of neighbours: the one that reaches beyond the queries has the last of them.
    return Keys(begin, max(end, block_of_token(row0 + end - 1u).y));
//#else
    return Keys(max(in_window, sample_begin(row0, first, end - 1u)), end);
//#endif
}

// Where the first sample begins that any of these queries, first to last of one row, sees; 0 where
// one is padding and sees everything.
fn sample_begin(row0: u32, first: u32, last: u32) -> u32 {
    let segment = segment_of(row0 + first);
    return select(0u, segment - 1u, segment != 0u && segment_of(row0 + last) != 0u);
}

fn segment_of(row: u32) -> u32 {
//#if SEGMENT_TEXELS
    return load_segments(row / 4u)[row % 4u];
//#else
    return segments[row];
//#endif
}

// Past the last query that sees any of the workgroup's keys, from first on.
fn end_of_queries(first: u32) -> u32 {
    return min(params.seq, first + BLOCK - 1u + min(params.seq, params.window));
}
//#if BLOCKS?

// The queries that see any of the workgroup's keys, from first on, and those between them.
fn queries_of_block(row0: u32, first: u32) -> Keys {
    return Keys(min(first, block_of_token(row0 + first).x), end_of_queries(first));
}

// Where the block of a row's token begins and ends.
fn block_of_token(row: u32) -> vec2<u32> {
    let at = params.rows + 2u * row;
    return vec2<u32>(segment_of(at), segment_of(at + 1u));
}

// The block of the query or of the key that an invocation holds.
var<private> own_block: vec2<u32>;

fn visible(query: u32, key: u32, query_segment: u32, key_segment: u32) -> bool {
    let near = select(query >= own_block.x && key < own_block.y, query - key < params.window, key <= query);
    return near && key_segment != 0u && (query_segment == 0u || query_segment == key_segment);
}
//#else

fn visible(query: u32, key: u32, query_segment: u32, key_segment: u32) -> bool {
    return key <= query && query - key < params.window && key_segment != 0u && (query_segment == 0u || query_segment == key_segment);
}
//#endif

// A score, and its derivative by scale · q·k.
struct Score {
    value: f32,
    slope: f32,
}

fn score(product: f32) -> Score {
//#if SOFTCAP
    let t = tanh_of(product / params.softcap);
    return Score(params.softcap * t, 1.0 - t * t);
//#else
    return Score(product, 1.0);
//#endif
}

// min(x, 0), but NaN stays NaN: exp would make an ordinary share of it. Told by bits: comparing floats
// is min to drivers that compile with fast math.
fn not_above_zero(x: f32) -> f32 {
    return select(x, 0.0, bitcast<u32>(x) - 1u < 0x7f800000u);
}
