// attention/dq.wgsl for software adapters, cut as attention/forward_texture.wgsl is.
// Launcher: kernels/attention/blocks.py.
//#include common/attention.wgsl
//#include common/attention_gradient.wgsl

//#input 1 q: 8 texture
//#input 2 k: 8 texture
//#input 3 v: 8 texture
//#input 5 dout: 8 texture
//#output 7 dq: 8

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
    let pair = lse_delta[(row0 + query) * params.heads + head];
    let keys = keys_of_block(row0, group.x * THREADS);
    var q_own: array<Eight, HEAD>;
    var do_own: array<Eight, HEAD>;
    var dq_own: array<Eight, HEAD>;
    //#unroll d HEAD
        q_own[$d] = scale8(load_q(q_base + $du), params.scale);
        do_own[$d] = load_dout(q_base + $du);
        dq_own[$d] = zero8();
    //#end
    for (var key = keys.begin; key < keys.end; key += KEYS) {
        let loaded = min(key + local.x % KEYS, params.seq - 1u);
        let at = kv_base + loaded * params.kv_stride;
        let loaded_segment = segments[row0 + loaded];
        //#unroll t UNITS: let k_$t = load_k(at + $tu); let v_$t = load_v(at + $tu);
        var products: array<f32, KEYS>;
        var dp: array<f32, KEYS>;
        var ds: array<f32, KEYS>;
        //#unroll c KEYS: products[$c] = 0.0; dp[$c] = 0.0;
        //#unroll l HOLDERS, t UNITS
            products[$lu % KEYS] += dot8(q_own[$lu / KEYS * UNITS + $tu], broadcast_k_$l(k_$t));
            dp[$lu % KEYS] += dot8(do_own[$lu / KEYS * UNITS + $tu], broadcast_v_$l(v_$t));
        //#end
        //#unroll c KEYS
            let sees_$c = key + $cu < params.seq
                && visible(query, key + $cu, segment, subgroupBroadcast(loaded_segment, $cu));
            ds[$c] = weight_of(products[$c], dp[$c], pair, sees_$c).ds;
        //#end
        //#unroll l HOLDERS, t UNITS
            dq_own[$lu / KEYS * UNITS + $tu] = add_scaled8(
                dq_own[$lu / KEYS * UNITS + $tu], ds[$lu % KEYS], broadcast_k_$l(k_$t));
        //#end
    }
    if (index < params.seq) {
        //#unroll d HEAD: store_dq(q_base + $du, scale8(dq_own[$d], params.scale));
    }
}
