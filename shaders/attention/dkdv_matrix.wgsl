//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/dkdv.wgsl on matrix units: a workgroup takes BLOCK keys of one head and walks the
// queries that see them, otherwise cut as attention/forward_matrix.wgsl is. PER_HEAD: dk and dv are
// those of each query head, of q's layout, to be summed over the heads that share a key; else the
// workgroup walks all of those, one a round. Launcher: kernels/attention/matrix_units.py.
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

//#if HALF
fn kept_q(i: u32) -> Kept {
    return halves_q(raw_q(i));
}

fn kept_k(i: u32) -> Kept {
    return halves_k(raw_k(i));
}

fn kept_v(i: u32) -> Kept {
    return halves_v(raw_v(i));
}

fn kept_dout(i: u32) -> Kept {
    return halves_dout(raw_dout(i));
}
//#else
fn kept_q(i: u32) -> Kept {
    return load_q(i);
}

fn kept_k(i: u32) -> Kept {
    return load_k(i);
}

fn kept_v(i: u32) -> Kept {
    return load_v(i);
}

fn kept_dout(i: u32) -> Kept {
    return load_dout(i);
}
//#endif

fn own_0(row: u32, unit: u32) -> Kept {
    return kept_k(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn own_1(row: u32, unit: u32) -> Kept {
    return kept_v(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

// A round is a head of q.
fn query_at(turn: Turn, row: u32) -> u32 {
    let head = min(turn.round, params.heads - 1u);
    return (turn.row0 + min(row, params.seq - 1u)) * params.q_stride + head * UNITS;
}

fn other_0(turn: Turn, row: u32, unit: u32) -> Kept {
    return kept_q(query_at(turn, row) + unit);
}

fn other_1(turn: Turn, row: u32, unit: u32) -> Kept {
    return kept_dout(query_at(turn, row) + unit);
}

// Log-sum-exps, then deltas.
fn told_of(i: u32, turn: Turn) -> vec4<f32> {
    let pairs = pairs_of(turn.row0, turn.other + i % INFO_FOURS * 4u, min(turn.round, params.heads - 1u));
    return select(pairs.delta, pairs.lse, i / INFO_FOURS == 0u);
}

fn ready_of(i: u32, told: vec4<f32>) -> vec4<f32> {
    return select(taken_of(told), power_of(told), vec4<bool>(i / INFO_FOURS == 0u));
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

fn is_near(turn: Turn) -> bool {
    let last = min(own_first + BLOCK, params.seq) - 1u;
    let far = turn.other + OTHERS - 1u;
    return turn.other >= last && far < params.seq && far - own_first < params.window;
}

fn weigh(index: u32, turn: Turn, info_at: u32, is_whole: bool) {
    //#unroll i OCTETS
    {
        let row = (index + $iu * THREADS) / SCORE_UNITS;
        let unit = (index + $iu * THREADS) % SCORE_UNITS;
        if (OCTETS * THREADS == BLOCK * SCORE_UNITS || row < BLOCK) {
            let at = SCORES_AT + row * SCORE_STRIDE + 2u * unit;
            let lse_at = info_at + 2u * unit;
            let delta_at = lse_at + INFO_FOURS;
            if (is_whole) {
                let lower = whole_weights(floats(at), floats(SCORES + at), floats(lse_at), floats(delta_at));
                let upper = whole_weights(floats(at + 1u), floats(SCORES + at + 1u), floats(lse_at + 1u), floats(delta_at + 1u));
                put_weights(at, unit, near8(eight(lower.ds, upper.ds)));
                put_weights(SCORES + at, unit, near8(eight(lower.p, upper.p)));
            } else {
                let query = turn.other + 8u * unit;
                let key = own_first + row;
                let own = vec4<u32>(segments[turn.row0 + min(key, params.seq - 1u)]);
//#if BLOCKS?
                take_blocks(turn.row0, vec4<u32>(key));
//#endif
                let lower_seen = sees(four_from(query), vec4<u32>(key), segments_of(turn.row0, query), own);
                let upper_seen = sees(four_from(query + 4u), vec4<u32>(key), segments_of(turn.row0, query + 4u), own);
                let lower = seen_weights(floats(at), floats(SCORES + at), floats(lse_at), floats(delta_at), lower_seen);
                let upper = seen_weights(floats(at + 1u), floats(SCORES + at + 1u), floats(lse_at + 1u), floats(delta_at + 1u), upper_seen);
                put_weights(at, unit, kept8(eight(lower.ds, upper.ds)));
                put_weights(SCORES + at, unit, kept8(eight(lower.p, upper.p)));
            }
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
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let group = block_of(id, count);
    let first = group.x / SPANS * BLOCK;
    let last = min(first + BLOCK, params.seq) - 1u;
    let row0 = group.z * params.seq;
    let kv_head = select(group.y, group.y / params.group, PER_HEAD);
    let heads_begin = select(group.y * params.group, group.y, PER_HEAD);
    let heads = select(params.group, 1u, PER_HEAD);
    own_first = first;
    kv_at = row0 * params.kv_stride + kv_head * UNITS;
    out_at = row0 * out_stride() + group.y * UNITS;
//#if BLOCKS?
    let queries = queries_of_block(row0, first);
//#else
    let end = end_of_queries(first);
//#endif
//#if HALF
    // Of all queries of the sequence and of all heads that share a key, as the factors of dout were made.
    let walked = largest_of_walk(group.z, kv_head * params.group, params.group, 0u, params.seq - 1u, index);
    take_scales(walked.x, largest_of(group.z, heads_begin, 1u, first, last, 0u, 1u).y);
    is_spoilt = walked.is_spoilt;
//#endif
//#if BLOCKS?
    attend(index, subgroup, first, group.x % SPANS, Turn(queries.begin, queries.begin, queries.end, heads_begin, heads_begin + heads, row0, segments[row0 + last]));
//#else
    attend(index, subgroup, first, group.x % SPANS, Turn(first, first, end, heads_begin, heads_begin + heads, row0, segments[row0 + last]));
//#endif
}
