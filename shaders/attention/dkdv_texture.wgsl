// attention/dkdv.wgsl for software adapters. A workgroup is a subgroup of THREADS keys of one head;
// it walks KEYS queries a turn, loaded and broadcast as keys are in
// attention/forward_texture.wgsl. Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_gradient.wgsl

//#input 1 q: 8 texture
//#input 2 k: 8 texture
//#input 3 v: 8 texture
//#input 5 dout: 8 texture
//#output 7 dk: 8
//#output 8 dv: 8

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // No invocation leaves alone: a broadcast needs all of them.
    let index = group.x * THREADS + local.x;
    let key = min(index, params.seq - 1u);
    let row0 = group.z * params.seq;
    let kv_at = (row0 + key) * params.kv_stride + group.y * HEAD;
    let piece = min(local.x, HOLDERS - 1u) / KEYS;
    let segment = segment_of(row0 + key);
//#if BLOCKS?
    own_block = block_of_token(row0 + key);
//#endif
    var k_own: array<Eight, HEAD>;
    var v_own: array<Eight, HEAD>;
    var dk_own: array<Eight, HEAD>;
    var dv_own: array<Eight, HEAD>;
    //#unroll d HEAD
        k_own[$d] = scale8(load_k(kv_at + $du), params.scale);
        v_own[$d] = load_v(kv_at + $du);
        dk_own[$d] = zero8();
        dv_own[$d] = zero8();
    //#end
//#if BLOCKS?
    let queries = queries_of_block(row0, group.x * THREADS);
//#else
    let end = end_of_queries(group.x * THREADS);
//#endif
    for (var h = 0u; h < params.group; h += 1u) {
        let head = group.y * params.group + h;
        let q_base = row0 * params.q_stride + head * HEAD + piece * UNITS;
//#if BLOCKS?
        for (var query = queries.begin; query < queries.end; query += KEYS) {
//#else
        // Earlier queries do not see these keys.
        for (var query = group.x * THREADS; query < end; query += KEYS) {
//#endif
            let loaded = min(query + local.x % KEYS, params.seq - 1u);
            let at = q_base + loaded * params.q_stride;
            let loaded_segment = segment_of(row0 + loaded);
            let loaded_pair = pair_of((row0 + loaded) * params.heads + head);
            //#unroll t UNITS: let q_$t = load_q(at + $tu); let do_$t = load_dout(at + $tu);
            var products: array<f32, KEYS>;
            var dp: array<f32, KEYS>;
            var weights: array<Weight, KEYS>;
            //#unroll c KEYS: products[$c] = 0.0; dp[$c] = 0.0;
            //#unroll l HOLDERS, t UNITS
                let q_$l_$t = broadcast_q_$l(q_$t);
                let do_$l_$t = broadcast_dout_$l(do_$t);
                products[$lu % KEYS] += dot8(k_own[$lu / KEYS * UNITS + $tu], q_$l_$t);
                dp[$lu % KEYS] += dot8(v_own[$lu / KEYS * UNITS + $tu], do_$l_$t);
            //#end
            //#unroll c KEYS
                let sees_$c = query + $cu < params.seq
                    && visible(query + $cu, key, subgroupBroadcast(loaded_segment, $cu), segment);
                weights[$c] = weight_of(products[$c], dp[$c], subgroupBroadcast(loaded_pair, $cu), sees_$c);
            //#end
            //#unroll l HOLDERS, t UNITS
                dv_own[$lu / KEYS * UNITS + $tu] = add_scaled8(
                    dv_own[$lu / KEYS * UNITS + $tu], weights[$lu % KEYS].p, do_$l_$t);
                dk_own[$lu / KEYS * UNITS + $tu] = add_scaled8(
                    dk_own[$lu / KEYS * UNITS + $tu], weights[$lu % KEYS].ds, q_$l_$t);
            //#end
        }
    }
    if (index < params.seq) {
        //#unroll d HEAD
            store_dk(kv_at + $du, scale8(dk_own[$d], params.scale));
            store_dv(kv_at + $du, dv_own[$d]);
        //#end
    }
}
