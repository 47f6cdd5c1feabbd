// scores[head, key] = scale · q[head]·k[key] (softcapped with SOFTCAP) for the keys that a new
// token at position past = batch_info[3] sees, -3e38 for the others.
//
// q (1, heads · head_dim), k (capacity, kv_heads · head_dim), scores (heads, capacity) float32,
// overwritten. Launcher: ops/cached_attention.py.
//#include common/flat.wgsl
//#if SOFTCAP
//#include common/tanh.wgsl
//#endif

struct Params {
    heads: u32,
    group: u32,
    kv_stride: u32,
    stride: u32,
    window: u32,
    scale: f32,
    softcap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if HEAD_UNIT4
//#input 1 q: 4
//#input 2 k: 4
//#else
//#input 1 q: 2
//#input 2 k: 2
//#endif
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> scores: array<f32>;

fn each(i: u32) {
    let head = i / params.stride;
    let key = i % params.stride;
    if (head >= params.heads) {
        return;
    }
    let past = batch_info[3];
    if (key > past || past - key >= params.window) {
        scores[i] = -3.0e38;
        return;
    }
    let q_at = head * UNITS;
    let k_at = key * params.kv_stride + head / params.group * UNITS;
    var sum = 0.0;
    for (var d = 0u; d < UNITS; d += 1u) {
        sum += dot(load_q(q_at + d), load_k(k_at + d));
    }
//#if SOFTCAP
    scores[i] = params.softcap * tanh_of(sum * params.scale / params.softcap);
//#else
    scores[i] = sum * params.scale;
//#endif
}
