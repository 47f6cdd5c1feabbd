// attention/forward.wgsl for software adapters. A workgroup is a subgroup of THREADS queries of one
// head, which is HEAD units of eight. It walks KEYS keys a turn: invocation i < HOLDERS loads piece
// i / KEYS, of UNITS units, of key i mod KEYS, which is then broadcast.
// Launcher: kernels/attention/blocks.py.
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
    let index = group.x * THREADS + local.x;
    let query = min(index, params.seq - 1u);
    let head = group.y;
    let row0 = group.z * params.seq;
    let q_base = (row0 + query) * params.q_stride + head * HEAD;
    let piece = min(local.x, HOLDERS - 1u) / KEYS;
    let kv_base = row0 * params.kv_stride + (head / params.group) * HEAD + piece * UNITS;
    let segment = segments[row0 + query];
    let keys = keys_of_block(row0, group.x * THREADS);
    var q_own: array<Eight, HEAD>;
    var o_own: array<Eight, HEAD>;
    //#unroll d HEAD: q_own[$d] = scale8(load_q(q_base + $du), params.scale); o_own[$d] = zero8();
    var highest = first_highest(head, -2.0e38);
    var sum = FIRST_SUM;
    for (var key = keys.begin; key < keys.end; key += KEYS) {
        let loaded = min(key + local.x % KEYS, params.seq - 1u);
        let at = kv_base + loaded * params.kv_stride;
        let loaded_segment = segments[row0 + loaded];
        //#unroll t UNITS: let k_$t = load_k(at + $tu); let v_$t = load_v(at + $tu);
        var s: array<f32, KEYS>;
        var p: array<f32, KEYS>;
        //#unroll c KEYS: s[$c] = 0.0;
        //#unroll l HOLDERS, t UNITS
            s[$lu % KEYS] += dot8(q_own[$lu / KEYS * UNITS + $tu], broadcast_k_$l(k_$t));
        //#end
        //#unroll c KEYS
            s[$c] = score(s[$c]).value;
            let sees_$c = key + $cu < params.seq
                && visible(query, key + $cu, segment, subgroupBroadcast(loaded_segment, $cu));
        //#end
        var next = highest;
        //#unroll c KEYS: next = max(next, select(-2.0e38, s[$c], sees_$c));
        let shrink = exp(highest - next);
        highest = next;
        sum *= shrink;
        //#unroll c KEYS: p[$c] = select(0.0, exp(not_above_zero(s[$c] - highest)), sees_$c); sum += p[$c];
        //#unroll d HEAD: o_own[$d] = scale8(o_own[$d], shrink);
        //#unroll l HOLDERS, t UNITS
            o_own[$lu / KEYS * UNITS + $tu] = add_scaled8(
                o_own[$lu / KEYS * UNITS + $tu], p[$lu % KEYS], broadcast_v_$l(v_$t));
        //#end
    }
    if (index < params.seq) {
        let share = select(0.0, 1.0 / sum, sum > 0.0);
        //#unroll d HEAD: store_o(q_base + $du, scale8(o_own[$d], share));
        lse[(row0 + query) * params.heads + head] = select(2.0e38, highest + accurate_log(sum), sum > 0.0);
    }
}
