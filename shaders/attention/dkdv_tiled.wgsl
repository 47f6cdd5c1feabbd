// attention/dkdv.wgsl for GPUs: a workgroup takes BLOCK keys of one head and walks the queries that
// see them, otherwise cut as attention/forward_tiled.wgsl is. PER_HEAD: dk and dv are those of each
// query head, of q's layout, to be summed over the heads that share a key; else the workgroup walks
// all of those. Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_fours.wgsl
//#include common/attention_tiles.wgsl
//#include common/attention_tile_gradient.wgsl
//#include common/attention_walk.wgsl

//#if HEAD_UNIT4
//#output 7 dk: 4
//#output 8 dv: 4
//#else
//#output 7 dk: 2
//#output 8 dv: 2
//#endif

var<private> q_at: u32;
var<private> kv_at: u32;

fn own_0(row: u32, unit: u32) -> vec4<f32> {
    return four_k(kv_at + row * params.kv_stride, unit);
}

fn other_0(row: u32, unit: u32) -> vec4<f32> {
    return four_q(q_at + row * params.q_stride, unit);
}

fn own_1(row: u32, unit: u32) -> vec4<f32> {
    return four_v(kv_at + row * params.kv_stride, unit);
}

fn other_1(row: u32, unit: u32) -> vec4<f32> {
    return four_dout(q_at + row * params.q_stride, unit);
}

fn mixed_0(row: u32, unit: u32) -> vec4<f32> {
    return other_0(row, unit);
}

fn mixed_1(row: u32, unit: u32) -> vec4<f32> {
    return other_1(row, unit);
}

fn put_dk_and_dv(at: u32, unit: u32, dk_value: vec4<f32>, dv_value: vec4<f32>) {
//#if HEAD_UNIT4
    store_dk(at + unit, dk_value);
    store_dv(at + unit, dv_value);
//#else
    store_dk(at + 2u * unit, dk_value.xy);
    store_dv(at + 2u * unit, dv_value.xy);
    if (2u * unit + 1u < HEAD_UNITS) {
        store_dk(at + 2u * unit + 1u, dk_value.zw);
        store_dv(at + 2u * unit + 1u, dv_value.zw);
    }
//#endif
}

//#if HALVES
// Makes d scores of the products in workgroup memory, for two queries by four keys; returns the
// weights of dv.
fn weigh(index: u32, row0: u32, head: u32, first: u32, query: u32) -> array<vec4<f32>, 2> {
    let place = place_of(index);
    let key = first + 4u * place.own;
    let own_query = query + 4u * place.other + 2u * place.half;
    let key_segments = segments_of(row0, key);
//#if BLOCKS?
    take_blocks(row0, four_from(key));
//#endif
    var kept: array<vec4<f32>, 2>;
    for (var k = 0u; k < turns(2u); k += 1u) {
        let at = 2u * place.half + k;
        let row = row0 + min(own_query + k, params.seq - 1u);
        let seen = sees(vec4<u32>(own_query + k), four_from(key), vec4<u32>(segments[row]), key_segments);
        let pair = lse_delta[row * params.heads + head];
        let weights = weights_of(tile[at][at_place(place)], tile[at][HALF + at_place(place)], vec4<f32>(pair.x), vec4<f32>(pair.y), seen);
        tile[at][at_place(place)] = weights.ds;
        kept[0] = select(kept[0], weights.p, k == 0u);
        kept[1] = weights.p;
    }
    workgroupBarrier();
    return kept;
}

fn put(index: u32, weights: array<vec4<f32>, 2>) {
    let place = place_of(index);
    //#unroll k 2: tile[2u * place.half + $ku][at_place(place)] = weights[$k];
}
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = block_of(id, count);
    take_place(index);
    let first = group.x / SPANS * BLOCK;
    let span_first = group.x % SPANS * SPAN;
    let last = min(first + BLOCK, params.seq) - 1u;
    let row0 = group.z * params.seq;
    let kv_head = select(group.y, group.y / params.group, PER_HEAD);
    let heads_begin = select(group.y * params.group, group.y, PER_HEAD);
    let heads_end = heads_begin + select(params.group, 1u, PER_HEAD);
    kv_at = row0 * params.kv_stride + kv_head * HEAD_UNITS;
//#if !HALVES
    let sample = own_sample(row0, first);
//#endif
    let last_segment = segments[row0 + last];
//#if BLOCKS?
    let queries = queries_of_block(row0, first);
//#else
    let end = end_of_queries(first);
//#endif
    for (var head = heads_begin; head < heads_end; head += 1u) {
        q_at = row0 * params.q_stride + head * HEAD_UNITS;
//#if HALVES
//#if BLOCKS?
        for (var query = queries.begin; query < queries.end; query += OTHERS) {
//#else
        // Earlier queries do not see these keys.
        for (var query = first; query < end; query += OTHERS) {
//#endif
            if (is_past(row0, query, OTHERS, last_segment)) {
                continue;
            }
            score_halves(index, first, query);
            let kept = weigh(index, row0, head, first, query);
            mix_part_0(index, query, span_first);
            put(index, kept);
            mix_part_1(index, query, span_first);
        }
//#else
//#if BLOCKS?
        for (var query = queries.begin; query < queries.end; query += BLOCK) {
//#else
        // Earlier queries do not see these keys.
        for (var query = first; query < end; query += BLOCK) {
//#endif
            if (is_past(row0, query, BLOCK, last_segment)) {
                continue;
            }
            let own_query = query + 4u * lane;
            let query_segments = segments_of(row0, own_query);
            let all_seen = query >= last && query + BLOCK <= params.seq && query + BLOCK - 1u - first < params.window && all(query_segments == vec4<u32>(sample));
            score_tile_0(index, first, query);
            score_tile_1(index, first, query);
            let pairs = pairs_of(row0, own_query, head);
            //#unroll b OWN
                let key_$b = first + 4u * own_four($bu);
                let key_segments_$b = segments_of(row0, key_$b);
//#if BLOCKS?
                take_blocks(row0, four_from(key_$b));
//#endif
                //#unroll k 4
                {
                    var seen = vec4<bool>(true);
                    if (!all_seen) {
                        seen = sees(vec4<u32>(own_query + $ku), four_from(key_$b), vec4<u32>(query_segments[$k]), key_segments_$b);
                    }
                    let weights = weights_of(score_0[$b][$k], score_1[$b][$k], vec4<f32>(pairs.lse[$k]), vec4<f32>(pairs.delta[$k]), seen);
                    score_0[$b][$k] = weights.ds;
                    score_1[$b][$k] = weights.p;
                }
                //#end
            //#end
            mix_tile_0(index, query, span_first);
            mix_tile_1(index, query, span_first);
        }
//#endif
    }
    let stride = select(params.kv_stride, params.q_stride, PER_HEAD);
    let out_at = row0 * stride + group.y * HEAD_UNITS;
    //#unroll b OWN, r 4
    {
        let key = first + 4u * own_four($bu) + $ru;
        if (key <= last) {
            //#unroll c COLUMNS: if (lane + $cu * LANES < SPAN && span_first + lane + $cu * LANES < UNITS) { put_dk_and_dv(out_at + key * stride, span_first + lane + $cu * LANES, mix_0[4 * $b + $r][$c] * params.scale, mix_1[4 * $b + $r][$c]); }
        }
    }
    //#end
    let heads = select(params.heads / params.group, params.heads, PER_HEAD);
    if (group.y == heads - 1u && span_first == 0u) {
        let tail = stride - heads * HEAD_UNITS;
        for (var i = index; i < (last + 1u - first) * tail; i += THREADS) {
            let at = out_at + (first + i / tail) * stride + HEAD_UNITS + i % tail;
            store_dk(at, HeadValue(0.0));
            store_dv(at, HeadValue(0.0));
        }
    }
}
