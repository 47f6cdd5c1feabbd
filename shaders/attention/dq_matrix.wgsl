//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/dq.wgsl on matrix units, cut as attention/forward_matrix.wgsl is.
// Launcher: kernels/attention/matrix_units.py.
//#include common/attention.wgsl
//#include common/attention_matrix.wgsl
//#include common/attention_matrix_keys.wgsl
//#include common/attention_matrix_gradient.wgsl
//#input 1 q: 8
//#input 2 k: 8
//#input 3 v: 8
//#input 5 dout: 8
//#output 7 dq: 8

var<private> q_at: u32;

//#unroll i OCTETS: var<private> pair_$i: vec2<f32>;

//#if HALF
fn kept_q(i: u32) -> Kept {
    return halves_q(raw_q(i));
}
//#else
fn kept_q(i: u32) -> Kept {
    return load_q(i);
}
//#endif

fn own_0(row: u32, unit: u32) -> Kept {
    return kept_q(q_at + min(row, params.seq - 1u) * params.q_stride + unit);
}

fn own_1(row: u32, unit: u32) -> Kept {
    return kept8(scale8(load_dout(q_at + min(row, params.seq - 1u) * params.q_stride + unit), x_scale));
}

fn after(turn: Turn) -> Turn {
    var next = turn;
    next.other += OTHERS;
    next.round += select(0u, 1u, next.other >= turn.end);
    return next;
}

fn weigh(index: u32, turn: Turn, info_at: u32, is_whole: bool) {
    //#unroll i OCTETS
    {
        let row = (index + $iu * THREADS) / SCORE_UNITS;
        let unit = (index + $iu * THREADS) % SCORE_UNITS;
        if (OCTETS * THREADS == BLOCK * SCORE_UNITS || row < BLOCK) {
            let at = SCORES_AT + row * SCORE_STRIDE + 2u * unit;
            let at_0 = power_of(vec4<f32>(pair_$i.x));
            let taken = taken_of(vec4<f32>(pair_$i.y));
            if (is_whole) {
                let lower = whole_weights(floats(at), floats(SCORES + at), at_0, taken);
                let upper = whole_weights(floats(at + 1u), floats(SCORES + at + 1u), at_0, taken);
                put_weights(at, unit, near8(eight(lower.ds, upper.ds)));
            } else {
                let query = own_first + row;
                let key = turn.other + 8u * unit;
                let own = vec4<u32>(segments[turn.row0 + min(query, params.seq - 1u)]);
//#if BLOCKS?
                take_blocks(turn.row0, vec4<u32>(query));
//#endif
                let lower_seen = sees(vec4<u32>(query), four_from(key), own, segments_of(turn.row0, key));
                let upper_seen = sees(vec4<u32>(query), four_from(key + 4u), own, segments_of(turn.row0, key + 4u));
                let lower = seen_weights(floats(at), floats(SCORES + at), at_0, taken, lower_seen);
                let upper = seen_weights(floats(at + 1u), floats(SCORES + at + 1u), at_0, taken, upper_seen);
                put_weights(at, unit, kept8(eight(lower.ds, upper.ds)));
            }
        }
    }
    //#end
}

fn put_0(row: u32, unit: u32, value: Eight) {
    store_dq(q_at + row * params.q_stride + unit, scale8(scale8(value, ds_inverse * params.scale), x_inverse));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let group = block_of(id, count);
    // The last queries see the most keys: they begin first.
    let block = (params.seq + BLOCK - 1u) / BLOCK - 1u - group.x / SPANS;
    let first = block * BLOCK;
    let last = min(first + BLOCK, params.seq) - 1u;
    let row0 = group.z * params.seq;
    own_first = first;
    q_at = row0 * params.q_stride + group.y * UNITS;
    kv_at = row0 * params.kv_stride + group.y / params.group * UNITS;
    let keys = keys_of_block(row0, first);
//#if HALF
//#if BLOCKS?
    take_scales(largest_of(group.z, group.y, 1u, first, last, 0u, 1u).x, largest_of_walk(group.z, group.y, 1u, keys.begin, keys.end - 1u, index).y);
//#else
    take_scales(largest_of(group.z, group.y, 1u, first, last, 0u, 1u).x, largest_of_walk(group.z, group.y, 1u, keys.begin, last, index).y);
//#endif
//#endif
    //#unroll i OCTETS
        let row_$i = row0 + min(first + (index + $iu * THREADS) / SCORE_UNITS, params.seq - 1u);
        pair_$i = lse_delta[row_$i * params.heads + group.y];
    //#end
    attend(index, subgroup, first, group.x % SPANS, Turn(keys.begin, keys.begin, keys.end, 0u, 1u, row0, 0u));
}
