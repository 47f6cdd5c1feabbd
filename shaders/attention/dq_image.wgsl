// dq = scale · Σ_key ds · k,  ds = p · (do·v - delta),  p = exp(scale · q·k - lse):
// attention/dq.wgsl for software adapters, cut as attention/forward_image.wgsl is.
//
// q, k, v, dout, dq are images, lse_delta (batch · seq, heads) float32 pairs, segments
// (batch · seq). Launcher: ops/attention_image.py.
//#include common/texel_values.wgsl
//#include common/attention_mask.wgsl

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
@group(0) @binding(5) var dout: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(6) var<storage, read> lse_delta: array<vec2<f32>>;
@group(0) @binding(7) var dq: texture_storage_2d<rgba32uint, write>;

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
    let known = lse_delta[(row0 + query) * params.heads + head];
    let end = min(params.seq, (group.x + 1u) * LANES);
    let begin = max(first_key(group.x * LANES), sample_begin(row0, group.x * LANES, end - 1u));
    //#unroll p PIECES, t TEXELS: let q_$p_$t = scaled(values(texel(q, q_base + $pu * TEXELS + $tu)), params.scale); let do_$p_$t = values(texel(dout, q_base + $pu * TEXELS + $tu)); var dq_$p_$t = no_values();
    for (var key = begin; key < end; key += KEYS) {
        let own = min(key + local.x % KEYS, params.seq - 1u);
        let at = kv_base + own * params.kv_stride;
        let own_segment = segments[row0 + own];
        //#unroll t TEXELS: let k_$t = texel(k, at + $tu); let v_$t = texel(v, at + $tu);
        //#unroll c KEYS: var s_$c = 0.0; var dp_$c = 0.0;
        //#unroll p PIECES, t TEXELS, c KEYS: s_$c += dot_values(q_$p_$t, values(subgroupBroadcast(k_$t, $pu * KEYS + $cu))); dp_$c += dot_values(do_$p_$t, values(subgroupBroadcast(v_$t, $pu * KEYS + $cu)));
//#if SOFTCAP
        //#unroll c KEYS: let t_$c = tanh_of(s_$c / params.softcap); s_$c = params.softcap * t_$c; let slope_$c = 1.0 - t_$c * t_$c;
//#else
        //#unroll c KEYS: const slope_$c = 1.0;
//#endif
        //#unroll c KEYS: let sees_$c = key + $cu < params.seq && visible(query, key + $cu, segment, subgroupBroadcast(own_segment, $cu)); let ds_$c = select(0.0, exp(min(s_$c - known.x, 0.0)), sees_$c) * (dp_$c - known.y) * slope_$c;
        //#unroll p PIECES, t TEXELS, c KEYS: dq_$p_$t = add_scaled(dq_$p_$t, ds_$c, values(subgroupBroadcast(k_$t, $pu * KEYS + $cu)));
    }
    if (wanted < params.seq) {
        //#unroll p PIECES, t TEXELS: textureStore(dq, place(q_base + $pu * TEXELS + $tu), to_texel(scaled(dq_$p_$t, params.scale)));
    }
}
