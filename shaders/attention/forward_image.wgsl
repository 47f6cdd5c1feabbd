// o = softmax(scale · q·kᵀ + mask) · v  and  lse = log Σ exp(scale · q·kᵀ + mask), causal, with
// grouped keys and values: attention/forward.wgsl for software adapters.
//
// q, k, v, o are images, whose rows take q_stride or kv_stride texels and whose heads take
// PIECES · TEXELS. A workgroup is a subgroup of LANES queries of one head. It walks KEYS keys a
// turn: invocation i loads piece i / KEYS of key i mod KEYS, which is then broadcast.
// segments (batch · seq), lse (batch · seq, heads) float32. Launcher: ops/attention_image.py.
//#include common/texel_values.wgsl
//#include common/attention_mask.wgsl
//#include common/log.wgsl

struct Params {
    seq: u32,
    heads: u32,
    group: u32,
    q_stride: u32,
    kv_stride: u32,
    window: u32,
    scale: f32,
    softcap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var q: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var k: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(3) var v: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(4) var<storage, read> segments: array<u32>;
@group(0) @binding(5) var o: texture_storage_2d<rgba32uint, write>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // No invocation leaves alone: a broadcast needs all of them.
    let wanted = group.x * LANES + local.x;
    let query = min(wanted, params.seq - 1u);
    let head = group.y;
    let row0 = group.z * params.seq;
    let q_base = (row0 + query) * params.q_stride + head * (PIECES * TEXELS);
    let piece = min(local.x / KEYS, PIECES - 1u);
    let kv_base = row0 * params.kv_stride + ((head / params.group) * PIECES + piece) * TEXELS;
    let segment = segments[row0 + query];
    let end = min(params.seq, (group.x + 1u) * LANES);
    let begin = max(first_key(group.x * LANES), sample_begin(row0, group.x * LANES, end - 1u));
    //#unroll p PIECES, t TEXELS: let q_$p_$t = scaled(values(texel(q, q_base + $pu * TEXELS + $tu)), params.scale); var o_$p_$t = no_values();
    var top = -3.0e38;
    var sum = 0.0;
    for (var key = begin; key < end; key += KEYS) {
        let own = min(key + local.x % KEYS, params.seq - 1u);
        let at = kv_base + own * params.kv_stride;
        let own_segment = segments[row0 + own];
        //#unroll t TEXELS: let k_$t = texel(k, at + $tu); let v_$t = texel(v, at + $tu);
        //#unroll c KEYS: var s_$c = 0.0;
        //#unroll p PIECES, t TEXELS, c KEYS: s_$c += dot_values(q_$p_$t, values(subgroupBroadcast(k_$t, $pu * KEYS + $cu)));
//#if SOFTCAP
        //#unroll c KEYS: s_$c = params.softcap * tanh_of(s_$c / params.softcap);
//#endif
        //#unroll c KEYS: let sees_$c = key + $cu < params.seq && visible(query, key + $cu, segment, subgroupBroadcast(own_segment, $cu));
        var next = top;
        //#unroll c KEYS: next = max(next, select(-3.0e38, s_$c, sees_$c));
        let shrink = exp(top - next);
        top = next;
        //#unroll c KEYS: let p_$c = select(0.0, exp(min(s_$c - top, 0.0)), sees_$c);
        sum *= shrink;
        //#unroll c KEYS: sum += p_$c;
        //#unroll p PIECES, t TEXELS: o_$p_$t = scaled(o_$p_$t, shrink);
        //#unroll p PIECES, t TEXELS, c KEYS: o_$p_$t = add_scaled(o_$p_$t, p_$c, values(subgroupBroadcast(v_$t, $pu * KEYS + $cu)));
    }
    if (wanted < params.seq) {
        let share = select(0.0, 1.0 / sum, sum > 0.0);
        //#unroll p PIECES, t TEXELS: textureStore(o, place(q_base + $pu * TEXELS + $tu), to_texel(scaled(o_$p_$t, share)));
        lse[(row0 + query) * params.heads + head] = select(3.0e38, top + accurate_log(sum), sum > 0.0);
    }
}
