// dq = scale · Σ_key ds · k,  ds = p · (do·v - delta),  p = exp(scale · q·k - lse).
//
// q, dout, dq (batch · seq, heads · head_dim), k, v (batch · seq, kv_heads · head_dim), lse_delta
// (batch · seq, heads) of float32 pairs, segments (batch · seq). dq is overwritten. One invocation
// holds one query of one head. Launcher: kernels/attention/workgroup.py.
//#include common/attention.wgsl
//#include common/attention_gradient.wgsl
//#include common/attention_heads.wgsl

//#if HEAD_UNIT4
//#output 7 dq: 4
//#else
//#output 7 dq: 2
//#endif

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
    let pair = lse_delta[(row0 + query) * params.heads + head];
    let keys = keys_of_block(row0, group.x * THREADS);
    //#unroll d UNITS
        let q_$d = load_q(q_base + $du) * params.scale;
        let do_$d = load_dout(q_base + $du);
        var dq_$d = HeadValue(0.0);
    //#end
    for (var key = keys.begin; key < keys.end; key += 1u) {
        let at = kv_base + key * params.kv_stride;
        var product = 0.0;
        var dp = 0.0;
        //#unroll d UNITS
            let k_$d = load_k(at + $du);
            product += dot(q_$d, k_$d);
            dp += dot(do_$d, load_v(at + $du));
        //#end
        let sees = visible(query, key, segment, segments[row0 + key]);
        let ds = weight_of(product, dp, pair, sees).ds;
        //#unroll d UNITS: dq_$d += ds * k_$d;
    }
    //#unroll d UNITS: store_dq(q_base + $du, dq_$d * params.scale);
    if (head == params.heads - 1u) {
        for (var d = params.heads * UNITS; d < params.q_stride; d += 1u) {
            store_dq((row0 + query) * params.q_stride + d, HeadValue(0.0));
        }
    }
}
