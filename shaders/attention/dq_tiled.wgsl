// attention/dq.wgsl for GPUs, cut as attention/forward_tiled.wgsl is.
// Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_fours.wgsl
//#include common/attention_tiles.wgsl
//#include common/attention_tile_gradient.wgsl

//#if HEAD_UNIT4
//#output 7 dq: 4
//#else
//#output 7 dq: 2
//#endif

var<private> q_at: u32;
var<private> kv_at: u32;

fn own_0(row: u32, unit: u32) -> vec4<f32> {
    return four_q(q_at + row * params.q_stride, unit);
}

fn other_0(row: u32, unit: u32) -> vec4<f32> {
    return four_k(kv_at + row * params.kv_stride, unit);
}

fn own_1(row: u32, unit: u32) -> vec4<f32> {
    return four_dout(q_at + row * params.q_stride, unit);
}

fn other_1(row: u32, unit: u32) -> vec4<f32> {
    return four_v(kv_at + row * params.kv_stride, unit);
}

fn mixed_0(row: u32, unit: u32) -> vec4<f32> {
    return other_0(row, unit);
}

fn put_dq(row: u32, unit: u32, value: vec4<f32>) {
//#if HEAD_UNIT4
    store_dq(q_at + row * params.q_stride + unit, value);
//#else
    let at = q_at + row * params.q_stride + 2u * unit;
    store_dq(at, value.xy);
    if (2u * unit + 1u < HEAD_UNITS) {
        store_dq(at + 1u, value.zw);
    }
//#endif
}

//#if HALVES
// Makes d scores of the products in workgroup memory, for two keys by four queries.
fn weigh(index: u32, row0: u32, head: u32, first: u32, key: u32) {
    let place = place_of(index);
    let query = first + 4u * place.own;
    let own_key = key + 4u * place.other + 2u * place.half;
    let query_segments = segments_of(row0, query);
//#if BLOCKS?
    take_blocks(row0, four_from(query));
//#endif
    let pairs = pairs_of(row0, query, head);
    for (var k = 0u; k < turns(2u); k += 1u) {
        let at = 2u * place.half + k;
        let key_segment = segments[row0 + min(own_key + k, params.seq - 1u)];
        let seen = sees(four_from(query), vec4<u32>(own_key + k), query_segments, vec4<u32>(key_segment));
        tile[at][at_place(place)] = weights_of(tile[at][at_place(place)], tile[at][HALF + at_place(place)], pairs.lse, pairs.delta, seen).ds;
    }
    workgroupBarrier();
}
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let group = block_of(id, count);
    take_place(index);
    // The last queries see the most keys: they begin first.
    let block = (params.seq + BLOCK - 1u) / BLOCK - 1u - group.x / SPANS;
    let span_first = group.x % SPANS * SPAN;
    let first = block * BLOCK;
    let last = min(first + BLOCK, params.seq) - 1u;
    let row0 = group.z * params.seq;
    q_at = row0 * params.q_stride + group.y * HEAD_UNITS;
    kv_at = row0 * params.kv_stride + group.y / params.group * HEAD_UNITS;
    let keys = keys_of_block(row0, first);
//#if HALVES
    for (var key = keys.begin; key < keys.end; key += OTHERS) {
        score_halves(index, first, key);
        weigh(index, row0, group.y, first, key);
        mix_part_0(index, key, span_first);
    }
//#else
    let sample = own_sample(row0, first);
    //#unroll b OWN: let query_$b = first + 4u * own_four($bu); let pairs_$b = pairs_of(row0, query_$b, group.y);
    for (var key = keys.begin; key < keys.end; key += BLOCK) {
        let own_key = key + 4u * lane;
        let key_segments = segments_of(row0, own_key);
        let all_seen = key + BLOCK - 1u <= first && last - key < params.window && all(key_segments == vec4<u32>(sample));
        score_tile_0(index, first, key);
        score_tile_1(index, first, key);
        //#unroll b OWN
            let query_segments_$b = segments_of(row0, query_$b);
//#if BLOCKS?
            take_blocks(row0, four_from(query_$b));
//#endif
            //#unroll k 4
            {
                var seen = vec4<bool>(true);
                if (!all_seen) {
                    seen = sees(four_from(query_$b), vec4<u32>(own_key + $ku), query_segments_$b, vec4<u32>(key_segments[$k]));
                }
                score_0[$b][$k] = weights_of(score_0[$b][$k], score_1[$b][$k], pairs_$b.lse, pairs_$b.delta, seen).ds;
            }
            //#end
        //#end
        mix_tile_0(index, key, span_first);
    }
//#endif
    //#unroll b OWN, r 4
    {
        let query = first + 4u * own_four($bu) + $ru;
        if (query <= last) {
            //#unroll c COLUMNS: if (lane + $cu * LANES < SPAN && span_first + lane + $cu * LANES < UNITS) { put_dq(query, span_first + lane + $cu * LANES, mix_0[4 * $b + $r][$c] * params.scale); }
        }
    }
    //#end
    if (group.y == params.heads - 1u && span_first == 0u) {
        let tail = params.q_stride - params.heads * HEAD_UNITS;
        for (var i = index; i < (last + 1u - first) * tail; i += THREADS) {
            store_dq(q_at + (first + i / tail) * params.q_stride + HEAD_UNITS + i % tail, HeadValue(0.0));
        }
    }
}
