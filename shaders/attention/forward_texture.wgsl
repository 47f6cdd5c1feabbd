// attention/forward.wgsl for software adapters. A workgroup is a subgroup of THREADS, of which each
// invocation has SETS queries of one head, THREADS apart; the head is HEAD units of eight. It walks KEYS
// keys a turn: invocation i < HOLDERS loads piece i / KEYS, of UNITS units, of key i mod KEYS, which is
// then broadcast to all, once for all sets.
// Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_sinks.wgsl
//#include common/log.wgsl

//#input 1 q: 8 texture
//#input 2 k: 8 texture
//#input 3 v: 8 texture
//#output 5 o: 8
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // No invocation leaves alone: a broadcast needs all of them.
    let first = group.x * (SETS * THREADS);
    let head = group.y;
    let row0 = group.z * params.seq;
    let piece = min(local.x, HOLDERS - 1u) / KEYS;
    let kv_base = row0 * params.kv_stride + (head / params.group) * HEAD + piece * UNITS;
    let keys = keys_of_block(row0, first);
    //#unroll b SETS
        let index_$b = first + $bu * THREADS + local.x;
        let query_$b = min(index_$b, params.seq - 1u);
        let q_base_$b = (row0 + query_$b) * params.q_stride + head * HEAD;
        let segment_$b = segment_of(row0 + query_$b);
//#if BLOCKS?
        let block_$b = block_of_token(row0 + query_$b);
//#endif
        var q_own_$b: array<Eight, HEAD>;
        var o_own_$b: array<Eight, HEAD>;
        //#unroll d HEAD: q_own_$b[$d] = scale8(load_q(q_base_$b + $du), params.scale); o_own_$b[$d] = zero8();
        var highest_$b = first_highest(head, -2.0e38);
        var sum_$b = FIRST_SUM;
    //#end
    for (var key = keys.begin; key < keys.end; key += KEYS) {
        let loaded = min(key + local.x % KEYS, params.seq - 1u);
        let at = kv_base + loaded * params.kv_stride;
        let loaded_segment = segment_of(row0 + loaded);
        //#unroll t UNITS: let k_$t = load_k(at + $tu); let v_$t = load_v(at + $tu);
        //#unroll b SETS
            var s_$b: array<f32, KEYS>;
            var p_$b: array<f32, KEYS>;
            //#unroll c KEYS: s_$b[$c] = 0.0;
        //#end
        //#unroll l HOLDERS, t UNITS
            let k_$l_$t = broadcast_k_$l(k_$t);
            //#unroll b SETS: s_$b[$lu % KEYS] += dot8(q_own_$b[$lu / KEYS * UNITS + $tu], k_$l_$t);
        //#end
        //#unroll c KEYS: let other_$c = subgroupBroadcast(loaded_segment, $cu);
        //#unroll b SETS
            var next_$b = highest_$b;
//#if BLOCKS?
            own_block = block_$b;
//#endif
            //#unroll c KEYS
                s_$b[$c] = score(s_$b[$c]).value;
                let sees_$b_$c = key + $cu < params.seq && visible(query_$b, key + $cu, segment_$b, other_$c);
                next_$b = max(next_$b, select(-2.0e38, s_$b[$c], sees_$b_$c));
            //#end
            let shrink_$b = exp(highest_$b - next_$b);
            highest_$b = next_$b;
            sum_$b *= shrink_$b;
            //#unroll c KEYS: p_$b[$c] = select(0.0, exp(not_above_zero(s_$b[$c] - highest_$b)), sees_$b_$c); sum_$b += p_$b[$c];
            //#unroll d HEAD: o_own_$b[$d] = scale8(o_own_$b[$d], shrink_$b);
        //#end
        //#unroll l HOLDERS, t UNITS
            let v_$l_$t = broadcast_v_$l(v_$t);
            //#unroll b SETS
                o_own_$b[$lu / KEYS * UNITS + $tu] = add_scaled8(
                    o_own_$b[$lu / KEYS * UNITS + $tu], p_$b[$lu % KEYS], v_$l_$t);
            //#end
        //#end
    }
    //#unroll b SETS
        if (index_$b < params.seq) {
            let share_$b = select(0.0, 1.0 / sum_$b, sum_$b > 0.0);
            //#unroll d HEAD: store_o(q_base_$b + $du, scale8(o_own_$b[$d], share_$b));
            lse[(row0 + query_$b) * params.heads + head] = select(2.0e38, highest_$b + accurate_log(sum_$b), sum_$b > 0.0);
        }
    //#end
}
