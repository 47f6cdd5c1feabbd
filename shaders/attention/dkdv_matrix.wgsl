//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/dkdv.wgsl on matrix units: a workgroup takes BLOCK keys of one head and walks the
// queries that see them, otherwise cut as attention/forward_matrix.wgsl is. PER_HEAD: dk and dv are
// those of each query head, of q's layout, to be summed over the heads that share a key; else the
// workgroup walks all of those, one a round. Launcher: kernels/attention/matrix_tiles.py.
//#include common/attention.wgsl
//#include common/attention_matrix.wgsl
//#include common/attention_matrix_gradient.wgsl
//#include common/attention_walk.wgsl
//#input 1 q: 8
//#input 2 k: 8
//#input 3 v: 8
//#input 5 dout: 8
//#output 7 dk: 8
//#output 8 dv: 8

var<private> kv_at: u32;
var<private> out_at: u32;
var<private> own_first: u32;

//#unroll i OCTETS: var<private> segment_$i: u32;

fn own_0(row: u32, unit: u32) -> Eight {
    return load_k(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn own_1(row: u32, unit: u32) -> Eight {
    return load_v(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

// A round is a head of q.
fn query_at(turn: Turn, row: u32) -> u32 {
    let head = min(turn.round, params.heads - 1u);
    return (turn.row0 + min(row, params.seq - 1u)) * params.q_stride + head * UNITS;
}

fn other_raw_0(turn: Turn, row: u32, unit: u32) -> Raw_q {
    return raw_q(query_at(turn, row) + unit);
}

fn other_raw_1(turn: Turn, row: u32, unit: u32) -> Raw_dout {
    return raw_dout(query_at(turn, row) + unit);
}

fn other_0(turn: Turn, row: u32, raw: Raw_q) -> Eight {
    return unpack_q(raw);
}

fn other_1(turn: Turn, row: u32, raw: Raw_dout) -> Eight {
    return scale8(unpack_dout(raw), x_scale);
}

// Segments, log-sum-exps and deltas.
fn info_of(i: u32, turn: Turn) -> vec4<u32> {
    let query = turn.other + i % INFO_FOURS * 4u;
    let query_segments = segments_of(turn.row0, query);
    let pairs = pairs_of(turn.row0, query, min(turn.round, params.heads - 1u));
    let pair = select(pairs.delta * x_scale, pairs.lse, i / INFO_FOURS == 1u);
    return select(bitcast<vec4<u32>>(pair), query_segments, i / INFO_FOURS == 0u);
}

fn after(turn: Turn) -> Turn {
    var next = turn;
    next.other += OTHERS;
    while (next.other < turn.end && is_past(turn.row0, next.other, OTHERS, turn.segment)) {
        next.other += OTHERS;
    }
    if (next.other >= turn.end) {
        next.other = turn.begin;
        next.round += 1u;
    }
    return next;
}

fn weigh(index: u32, turn: Turn, info_at: u32) {
    let last = min(own_first + BLOCK, params.seq) - 1u;
    let far = turn.other + OTHERS - 1u;
    let near = turn.other >= last && far < params.seq && far - own_first < params.window;
    //#unroll i OCTETS
    {
        let row = (index + $iu * THREADS) / SCORE_UNITS;
        let unit = (index + $iu * THREADS) % SCORE_UNITS;
        if (OCTETS * THREADS == BLOCK * SCORE_UNITS || row < BLOCK) {
            let at = SCORES_AT + row * SCORE_STRIDE + 2u * unit;
            let lower_segments = memory[info_at + 2u * unit];
            let upper_segments = memory[info_at + 2u * unit + 1u];
            let own = vec4<u32>(segment_$i);
            var lower_seen = vec4<bool>(true);
            var upper_seen = vec4<bool>(true);
            if (!near || segment_$i == 0u || any(lower_segments != own) || any(upper_segments != own)) {
                let query = turn.other + 8u * unit;
                let key = vec4<u32>(own_first + row);
                lower_seen = sees(four_from(query), key, lower_segments, own);
                upper_seen = sees(four_from(query + 4u), key, upper_segments, own);
            }
            let lse_at = info_at + INFO_FOURS + 2u * unit;
            let delta_at = lse_at + INFO_FOURS;
            let lower = weights_of(floats(at), floats(SCORES + at), floats(lse_at), floats(delta_at), lower_seen);
            let upper = weights_of(floats(at + 1u), floats(SCORES + at + 1u), floats(lse_at + 1u), floats(delta_at + 1u), upper_seen);
            put_weights(at, unit, lower.ds * ds_scale, upper.ds * ds_scale);
            put_weights(SCORES + at, unit, lower.p * WEIGHT_SCALE, upper.p * WEIGHT_SCALE);
        }
    }
    //#end
}

fn out_stride() -> u32 {
    return select(params.kv_stride, params.q_stride, PER_HEAD);
}

fn put_0(row: u32, unit: u32, value: Eight) {
    store_dk(out_at + row * out_stride() + unit, scale8(scale8(value, ds_inverse * params.scale), x_inverse));
}

fn put_1(row: u32, unit: u32, value: Eight) {
    store_dv(out_at + row * out_stride() + unit, scale8(scale8(value, 1.0 / WEIGHT_SCALE), x_inverse));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let first = group.x / SPANS * BLOCK;
    let last = min(first + BLOCK, params.seq) - 1u;
    let row0 = group.z * params.seq;
    let kv_head = select(group.y, group.y / params.group, PER_HEAD);
    let heads_begin = select(group.y * params.group, group.y, PER_HEAD);
    let heads = select(params.group, 1u, PER_HEAD);
    own_first = first;
    kv_at = row0 * params.kv_stride + kv_head * UNITS;
    out_at = row0 * out_stride() + group.y * UNITS;
    // Earlier queries do not see these keys.
    let end = end_of_queries(first);
//#if HALF
    take_scales(largest_of_walk(group.z, heads_begin, heads, first, end - 1u, index).x, largest_of(group.z, heads_begin, 1u, first, last, 0u, 1u).y);
//#endif
    //#unroll i OCTETS: segment_$i = segments[row0 + min(first + (index + $iu * THREADS) / SCORE_UNITS, params.seq - 1u)];
    attend(index, subgroup, first, group.x % SPANS, Turn(first, first, end, heads_begin, heads_begin + heads, row0, segments[row0 + last]));
}
