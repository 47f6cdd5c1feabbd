// dv = Σ_query p · do,  dk = scale · Σ_query ds · q,  ds = p · (do·v - delta),
// p = exp(scale · q·k - lse), over the queries of all heads that share the key's head.
//
// q, dout (batch · seq, heads · head_dim), k, v, dk, dv (batch · seq, kv_heads · head_dim),
// lse_delta (batch · seq, heads) of float32 pairs, segments (batch · seq). dk and dv are
// overwritten. One invocation holds one key of one head. Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_gradient.wgsl
//#include common/attention_heads.wgsl

//#if HEAD_UNIT4
//#output 7 dk: 4
//#output 8 dv: 4
//#else
//#output 7 dk: 2
//#output 8 dv: 2
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let key = group.x * THREADS + local.x;
    if (key >= params.seq) {
        return;
    }
    let row0 = group.z * params.seq;
    let kv_at = (row0 + key) * params.kv_stride + group.y * UNITS;
    let segment = segments[row0 + key];
//#if BLOCKS?
    own_block = block_of_token(row0 + key);
//#endif
    //#unroll d UNITS
        let k_$d = load_k(kv_at + $du) * params.scale;
        let v_$d = load_v(kv_at + $du);
        var dk_$d = HeadValue(0.0);
        var dv_$d = HeadValue(0.0);
    //#end
//#if BLOCKS?
    let queries = queries_of_block(row0, group.x * THREADS);
//#else
    let end = end_of_queries(group.x * THREADS);
//#endif
    for (var h = 0u; h < params.group; h += 1u) {
        let head = group.y * params.group + h;
//#if BLOCKS?
        for (var query = queries.begin; query < queries.end; query += 1u) {
//#else
        // Earlier queries do not see these keys.
        for (var query = group.x * THREADS; query < end; query += 1u) {
//#endif
            let at = (row0 + query) * params.q_stride + head * UNITS;
            var product = 0.0;
            var dp = 0.0;
            //#unroll d UNITS
                let q_$d = load_q(at + $du);
                let do_$d = load_dout(at + $du);
                product += dot(k_$d, q_$d);
                dp += dot(v_$d, do_$d);
            //#end
            let sees = visible(query, key, segments[row0 + query], segment);
            let pair = lse_delta[(row0 + query) * params.heads + head];
            let weight = weight_of(product, dp, pair, sees);
            //#unroll d UNITS: dv_$d += weight.p * do_$d; dk_$d += weight.ds * q_$d;
        }
    }
    //#unroll d UNITS: store_dk(kv_at + $du, dk_$d * params.scale); store_dv(kv_at + $du, dv_$d);
    if (group.y == params.heads / params.group - 1u) {
        for (var d = (group.y + 1u) * UNITS; d < params.kv_stride; d += 1u) {
            store_dk((row0 + key) * params.kv_stride + d, HeadValue(0.0));
            store_dv((row0 + key) * params.kv_stride + d, HeadValue(0.0));
        }
    }
}
