// attention/forward.wgsl for GPUs: a workgroup takes BLOCK queries of one head, keys and values pass
// through its memory, BLOCK at a time. With several SPANS workgroups make some columns of o each,
// each with the scores of the whole head. Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_fours.wgsl
//#include common/attention_sinks.wgsl
//#include common/attention_tiles.wgsl
//#include common/attention_softmax.wgsl
//#include common/log.wgsl

//#if HEAD_UNIT4
//#output 5 o: 4
//#else
//#output 5 o: 2
//#endif
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

var<private> q_at: u32;
var<private> kv_at: u32;

fn own_0(row: u32, unit: u32) -> vec4<f32> {
    return four_q(q_at + row * params.q_stride, unit);
}

fn other_0(row: u32, unit: u32) -> vec4<f32> {
    return four_k(kv_at + row * params.kv_stride, unit);
}

fn mixed_0(row: u32, unit: u32) -> vec4<f32> {
    return four_v(kv_at + row * params.kv_stride, unit);
}

//#if HEAD_UNIT4
fn put_o(row: u32, unit: u32, value: vec4<f32>) {
    store_o(q_at + row * params.q_stride + unit, value);
}
//#else
fn put_o(row: u32, unit: u32, value: vec4<f32>) {
    let at = q_at + row * params.q_stride + 2u * unit;
    store_o(at, value.xy);
    if (2u * unit + 1u < HEAD_UNITS) {
        store_o(at + 1u, value.zw);
    }
}
//#endif

// What all lanes of a line hold, for each to reduce: four values of own rows.
fn share(b: u32, values: vec4<f32>) {
    tile[lane % 4u][lane / 4u * FOURS + own_four(b)] = values;
}

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
    let sample = own_sample(row0, first);
    let keys = keys_of_block(row0, first);
    // All lanes of a row know of the sink, and one counts it.
    let first_highest = vec4<f32>(first_highest(group.y, LEAST));
    let first_sum = vec4<f32>(select(0.0, FIRST_SUM, lane == 0u));
    //#unroll b OWN: var highest_$b = first_highest; var sum_$b = first_sum;
    for (var key = keys.begin; key < keys.end; key += BLOCK) {
        let own_key = key + 4u * lane;
        let key_segments = segments_of(row0, own_key);
        let all_seen = key + BLOCK - 1u <= first && last - key < params.window && all(key_segments == vec4<u32>(sample));
        score_tile_0(index, first, key);
        //#unroll b OWN, k 4: score_0[$b][$k] = scores_of(score_0[$b][$k]);
        if (!all_seen) {
            //#unroll b OWN
                let query_$b = first + 4u * own_four($bu);
                let query_segments_$b = segments_of(row0, query_$b);
//#if BLOCKS?
                take_blocks(row0, four_from(query_$b));
//#endif
                //#unroll k 4: score_0[$b][$k] = select(vec4<f32>(HIDDEN), score_0[$b][$k], sees(four_from(query_$b), vec4<u32>(own_key + $ku), query_segments_$b, vec4<u32>(key_segments[$k])));
            //#end
        }
        //#unroll b OWN
            share($bu, max(max(score_0[$b][0], score_0[$b][1]), max(score_0[$b][2], score_0[$b][3])));
            var next_$b = highest_$b;
        //#end
        workgroupBarrier();
        for (var four = 0u; four < LANES / 4u; four += 1u) {
            //#unroll b OWN, j 4: next_$b = max(next_$b, tile[$j][four * FOURS + own_four($bu)]);
        }
        //#unroll b OWN
            let shrink_$b = exp(highest_$b - next_$b);
            highest_$b = next_$b;
            sum_$b *= shrink_$b;
            //#unroll k 4: score_0[$b][$k] = exp(score_0[$b][$k] - next_$b); sum_$b += score_0[$b][$k];
            //#unroll r 4, c COLUMNS: mix_0[4 * $b + $r][$c] *= shrink_$b[$r];
        //#end
        workgroupBarrier();
        mix_tile_0(index, key, span_first);
    }
    //#unroll b OWN: share($bu, sum_$b); sum_$b = vec4<f32>(0.0);
    workgroupBarrier();
    for (var four = 0u; four < LANES / 4u; four += 1u) {
        //#unroll b OWN, j 4: sum_$b += tile[$j][four * FOURS + own_four($bu)];
    }
    //#unroll b OWN, r 4
    {
        let query = first + 4u * own_four($bu) + $ru;
        let seen = sum_$b[$r] > 0.0;
        if (query <= last) {
            let portion = select(0.0, 1.0 / sum_$b[$r], seen);
            //#unroll c COLUMNS: if (lane + $cu * LANES < SPAN && span_first + lane + $cu * LANES < UNITS) { put_o(query, span_first + lane + $cu * LANES, mix_0[4 * $b + $r][$c] * portion); }
            if (lane == 0u && span_first == 0u) {
                lse[(row0 + query) * params.heads + group.y] = select(2.0e38, highest_$b[$r] + accurate_log(sum_$b[$r]), seen);
            }
        }
    }
    //#end
    if (group.y == params.heads - 1u && span_first == 0u) {
        let tail = params.q_stride - params.heads * HEAD_UNITS;
        for (var i = index; i < (last + 1u - first) * tail; i += THREADS) {
            store_o(q_at + (first + i / tail) * params.q_stride + HEAD_UNITS + i % tail, HeadValue(0.0));
        }
    }
}
