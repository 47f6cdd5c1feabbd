// dv = Σ_query p · do,  dk = scale · Σ_query ds · q,  ds = p · (do·v - delta),
// p = exp(scale · q·k - lse), over the queries of all heads that share the key's head:
// attention/dkdv.wgsl for software adapters.
//
// q, k, v, dout, dk, dv are images, lse_delta (batch · seq, heads) float32 pairs, segments
// (batch · seq). A workgroup is a subgroup of LANES keys of one head; it walks KEYS queries a turn,
// loaded and broadcast as keys are in attention/forward_image.wgsl. Launcher:
// ops/attention_image.py.
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
@group(0) @binding(7) var dk: texture_storage_2d<rgba32uint, write>;
@group(0) @binding(8) var dv: texture_storage_2d<rgba32uint, write>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // No invocation leaves alone: a broadcast needs all of them.
    let wanted = group.x * LANES + local.x;
    let key = min(wanted, params.seq - 1u);
    let row0 = group.z * params.seq;
    let kv_at = (row0 + key) * params.kv_stride + group.y * (PIECES * TEXELS);
    let piece = min(local.x / KEYS, PIECES - 1u);
    let segment = segments[row0 + key];
    //#unroll p PIECES, t TEXELS: let k_$p_$t = scaled(values(texel(k, kv_at + $pu * TEXELS + $tu)), params.scale); let v_$p_$t = values(texel(v, kv_at + $pu * TEXELS + $tu)); var dk_$p_$t = no_values(); var dv_$p_$t = no_values();
    let end = last_query((group.x + 1u) * LANES - 1u);
    for (var h = 0u; h < params.group; h += 1u) {
        let head = group.y * params.group + h;
        let q_base = row0 * params.q_stride + (head * PIECES + piece) * TEXELS;
        // Earlier queries do not see these keys.
        for (var query = group.x * LANES; query < end; query += KEYS) {
            let own = min(query + local.x % KEYS, params.seq - 1u);
            let at = q_base + own * params.q_stride;
            let own_segment = segments[row0 + own];
            let known = lse_delta[(row0 + own) * params.heads + head];
            //#unroll t TEXELS: let q_$t = texel(q, at + $tu); let do_$t = texel(dout, at + $tu);
            //#unroll c KEYS: var s_$c = 0.0; var dp_$c = 0.0;
            //#unroll p PIECES, t TEXELS, c KEYS: let q_$p_$t_$c = values(subgroupBroadcast(q_$t, $pu * KEYS + $cu)); let do_$p_$t_$c = values(subgroupBroadcast(do_$t, $pu * KEYS + $cu)); s_$c += dot_values(k_$p_$t, q_$p_$t_$c); dp_$c += dot_values(v_$p_$t, do_$p_$t_$c);
//#if SOFTCAP
            //#unroll c KEYS: let t_$c = tanh_of(s_$c / params.softcap); s_$c = params.softcap * t_$c; let slope_$c = 1.0 - t_$c * t_$c;
//#else
            //#unroll c KEYS: const slope_$c = 1.0;
//#endif
            //#unroll c KEYS: let sees_$c = query + $cu < params.seq && visible(query + $cu, key, subgroupBroadcast(own_segment, $cu), segment); let p_$c = select(0.0, exp(min(s_$c - subgroupBroadcast(known.x, $cu), 0.0)), sees_$c); let ds_$c = p_$c * (dp_$c - subgroupBroadcast(known.y, $cu)) * slope_$c;
            //#unroll p PIECES, t TEXELS, c KEYS: dv_$p_$t = add_scaled(dv_$p_$t, p_$c, do_$p_$t_$c); dk_$p_$t = add_scaled(dk_$p_$t, ds_$c, q_$p_$t_$c);
        }
    }
    if (wanted < params.seq) {
        //#unroll p PIECES, t TEXELS: textureStore(dk, place(kv_at + $pu * TEXELS + $tu), to_texel(scaled(dk_$p_$t, params.scale))); textureStore(dv, place(kv_at + $pu * TEXELS + $tu), to_texel(dv_$p_$t));
    }
}
