// attention/dq.wgsl for software adapters, cut as attention/forward_texture.wgsl is.
// Launcher: kernels/attention/workgroup.py.
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
        let pair_$b = pair_of((row0 + query_$b) * params.heads + head);
        var q_own_$b: array<Eight, HEAD>;
        var do_own_$b: array<Eight, HEAD>;
        var dq_own_$b: array<Eight, HEAD>;
        //#unroll d HEAD
            q_own_$b[$d] = scale8(load_q(q_base_$b + $du), params.scale);
            do_own_$b[$d] = load_dout(q_base_$b + $du);
            dq_own_$b[$d] = zero8();
        //#end
    //#end
    for (var key = keys.begin; key < keys.end; key += KEYS) {
        let loaded = min(key + local.x % KEYS, params.seq - 1u);
        let at = kv_base + loaded * params.kv_stride;
        let loaded_segment = segment_of(row0 + loaded);
        //#unroll t UNITS: let k_$t = load_k(at + $tu); let v_$t = load_v(at + $tu);
        //#unroll b SETS
            var products_$b: array<f32, KEYS>;
            var dp_$b: array<f32, KEYS>;
            var ds_$b: array<f32, KEYS>;
            //#unroll c KEYS: products_$b[$c] = 0.0; dp_$b[$c] = 0.0;
        //#end
        //#unroll l HOLDERS, t UNITS
            let k_$l_$t = broadcast_k_$l(k_$t);
            let v_$l_$t = broadcast_v_$l(v_$t);
            //#unroll b SETS
                products_$b[$lu % KEYS] += dot8(q_own_$b[$lu / KEYS * UNITS + $tu], k_$l_$t);
                dp_$b[$lu % KEYS] += dot8(do_own_$b[$lu / KEYS * UNITS + $tu], v_$l_$t);
            //#end
        //#end
        //#unroll c KEYS
            let other_$c = subgroupBroadcast(loaded_segment, $cu);
            //#unroll b SETS
//#if BLOCKS?
                own_block = block_$b;
//#endif
                let sees_$b_$c = key + $cu < params.seq && visible(query_$b, key + $cu, segment_$b, other_$c);
                ds_$b[$c] = weight_of(products_$b[$c], dp_$b[$c], pair_$b, sees_$b_$c).ds;
            //#end
        //#end
        //#unroll l HOLDERS, t UNITS
            //#unroll b SETS
                dq_own_$b[$lu / KEYS * UNITS + $tu] = add_scaled8(
                    dq_own_$b[$lu / KEYS * UNITS + $tu], ds_$b[$lu % KEYS], k_$l_$t);
            //#end
        //#end
    }
    //#unroll b SETS
        if (index_$b < params.seq) {
            //#unroll d HEAD: store_dq(q_base_$b + $du, scale8(dq_own_$b[$d], params.scale));
        }
    //#end
}
