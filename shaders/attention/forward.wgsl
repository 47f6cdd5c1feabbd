// o = softmax(scale · q·kᵀ + mask) · v  and  lse = log Σ exp(scale · q·kᵀ + mask), causal, with
// grouped keys and values, after FlashAttention (Dao et al., 2022): scores never exist whole. With
// sinks (heads), both sums have exp(sink) beside the keys' terms.
//
// q, o (batch · seq, heads · head_dim), k, v (batch · seq, kv_heads · head_dim), segments
// (batch · seq), lse (batch · seq, heads) float32. o and lse are overwritten; a query that sees no
// key gets o = 0, and a large lse without a sink. One invocation holds one query of one head and walks KEYS keys a
// turn. Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_heads.wgsl
//#include common/attention_sinks.wgsl
//#include common/log.wgsl

//#if HEAD_UNIT4
//#output 5 o: 4
//#else
//#output 5 o: 2
//#endif
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let query = group.x * THREADS + local.x;
    if (query >= params.seq) {
        return;
    }
    let head = group.y;
    let row0 = group.z * params.seq;
    let q_base = (row0 + query) * params.q_stride + head * UNITS;
    let kv_base = row0 * params.kv_stride + (head / params.group) * UNITS;
    let segment = segments[row0 + query];
//#if BLOCKS?
    own_block = block_of_token(row0 + query);
//#endif
    let keys = keys_of_block(row0, group.x * THREADS);
    //#unroll d UNITS: let q_$d = load_q(q_base + $du) * params.scale; var o_$d = HeadValue(0.0);
    var highest = first_highest(head, -2.0e38);
    var sum = FIRST_SUM;
    for (var key = keys.begin; key < keys.end; key += KEYS) {
        //#unroll c KEYS
            let key_$c = min(key + $cu, params.seq - 1u);
            let at_$c = kv_base + key_$c * params.kv_stride;
            let sees_$c = key + $cu < params.seq && visible(query, key + $cu, segment, segments[row0 + key_$c]);
            var s_$c = 0.0;
        //#end
        //#unroll c KEYS, d UNITS: s_$c += dot(q_$d, load_k(at_$c + $du));
        //#unroll c KEYS: s_$c = score(s_$c).value;
        var next = highest;
        //#unroll c KEYS: next = max(next, select(-2.0e38, s_$c, sees_$c));
        let shrink = exp(highest - next);
        highest = next;
        //#unroll c KEYS: let p_$c = select(0.0, exp(not_above_zero(s_$c - highest)), sees_$c);
        sum *= shrink;
        //#unroll c KEYS: sum += p_$c;
        //#unroll d UNITS: o_$d *= shrink;
        //#unroll c KEYS, d UNITS: o_$d += p_$c * load_v(at_$c + $du);
    }
    let lse_at = (row0 + query) * params.heads + head;
    if (sum > 0.0) {
        lse[lse_at] = highest + accurate_log(sum);
    } else {
        lse[lse_at] = 2.0e38;
    }
    let share = select(0.0, 1.0 / sum, sum > 0.0);
    //#unroll d UNITS: store_o(q_base + $du, o_$d * share);
    if (head == params.heads - 1u) {
        for (var d = params.heads * UNITS; d < params.q_stride; d += 1u) {
            store_o((row0 + query) * params.q_stride + d, HeadValue(0.0));
        }
    }
}
