//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// attention/dq.wgsl on matrix units, cut as attention/forward_matrix.wgsl is.
// Launcher: kernels/attention/matrix_tiles.py.
//#include common/attention.wgsl
//#include common/attention_matrix.wgsl
//#include common/attention_matrix_gradient.wgsl
//#input 1 q: 8
//#input 2 k: 8
//#input 3 v: 8
//#input 5 dout: 8
//#output 7 dq: 8

var<private> q_at: u32;
var<private> kv_at: u32;
var<private> own_first: u32;

//#unroll i OCTETS: var<private> segment_$i: u32; var<private> pair_$i: vec2<f32>;

fn own_0(row: u32, unit: u32) -> Eight {
    return load_q(q_at + min(row, params.seq - 1u) * params.q_stride + unit);
}

fn own_1(row: u32, unit: u32) -> Eight {
    return scale8(load_dout(q_at + min(row, params.seq - 1u) * params.q_stride + unit), x_scale);
}

fn other_raw_0(turn: Turn, row: u32, unit: u32) -> Raw_k {
    return raw_k(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn other_raw_1(turn: Turn, row: u32, unit: u32) -> Raw_v {
    return raw_v(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn other_0(turn: Turn, row: u32, raw: Raw_k) -> Eight {
    return unpack_k(raw);
}

fn other_1(turn: Turn, row: u32, raw: Raw_v) -> Eight {
    return unpack_v(raw);
}

fn info_of(i: u32, turn: Turn) -> vec4<u32> {
    return segments_of(turn.row0, turn.other + i % INFO_FOURS * 4u);
}

fn after(turn: Turn) -> Turn {
    var next = turn;
    next.other += OTHERS;
    next.round += select(0u, 1u, next.other >= turn.end);
    return next;
}

fn weigh(index: u32, turn: Turn, info_at: u32) {
    let last = min(own_first + BLOCK, params.seq) - 1u;
    let near = turn.other + OTHERS - 1u <= own_first && last - turn.other < params.window;
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
                let query = vec4<u32>(own_first + row);
                let key = turn.other + 8u * unit;
                lower_seen = sees(query, four_from(key), own, lower_segments);
                upper_seen = sees(query, four_from(key + 4u), own, upper_segments);
            }
            let row_lse = vec4<f32>(pair_$i.x);
            let row_delta = vec4<f32>(pair_$i.y);
            let lower = weights_of(floats(at), floats(SCORES + at), row_lse, row_delta, lower_seen);
            let upper = weights_of(floats(at + 1u), floats(SCORES + at + 1u), row_lse, row_delta, upper_seen);
            put_weights(at, unit, lower.ds * ds_scale, upper.ds * ds_scale);
        }
    }
    //#end
}

fn put_0(row: u32, unit: u32, value: Eight) {
    store_dq(q_at + row * params.q_stride + unit, scale8(scale8(value, ds_inverse * params.scale), x_inverse));
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
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
    take_scales(largest_of(group.z, group.y, 1u, first, last, 0u, 1u).x, largest_of_walk(group.z, group.y, 1u, keys.begin, last, index).y);
//#endif
    //#unroll i OCTETS
        let row_$i = row0 + min(first + (index + $iu * THREADS) / SCORE_UNITS, params.seq - 1u);
        segment_$i = segments[row_$i];
        pair_$i = lse_delta[row_$i * params.heads + group.y] * vec2<f32>(1.0, x_scale);
    //#end
    attend(index, subgroup, first, group.x % SPANS, Turn(keys.begin, keys.begin, keys.end, 0u, 1u, row0, 0u));
}
