// dv = Σ_query p · do,  dk = scale · Σ_query ds · q,  ds = p · (do·v - delta),
// p = exp(scale · q·k - lse), over the queries of all heads that share the key's head.
//
// q, dout (batch · seq, heads · head_dim), k, v, dk, dv (batch · seq, kv_heads · head_dim)
// operands, lse_delta (batch · seq, heads) of float32 pairs, segments (batch · seq).
// dk and dv are overwritten. One invocation holds one key of one head. Launcher: ops/attention.py.
//#include common/head_unit.wgsl
//#include common/attention_mask.wgsl

struct Params {
    seq: u32,
    heads: u32,
    group: u32,
    q_stride: u32,
    kv_stride: u32,
    pad_units: u32,
    window: u32,
    scale: f32,
    softcap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> q: array<HeadUnit>;
@group(0) @binding(2) var<storage, read> k: array<HeadUnit>;
@group(0) @binding(3) var<storage, read> v: array<HeadUnit>;
@group(0) @binding(4) var<storage, read> segments: array<u32>;
@group(0) @binding(5) var<storage, read> dout: array<HeadUnit>;
@group(0) @binding(6) var<storage, read> lse_delta: array<vec2<f32>>;
@group(0) @binding(7) var<storage, read_write> dk: array<HeadUnit>;
@group(0) @binding(8) var<storage, read_write> dv: array<HeadUnit>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let key = group.x * LANES + local.x;
    if (key >= params.seq) {
        return;
    }
    let row0 = group.z * params.seq;
    let kv_at = (row0 + key) * params.kv_stride + group.y * UNITS;
    let segment = segments[row0 + key];
    //#unroll d UNITS: let k_$d = unpack_head(k[kv_at + $du]) * params.scale; let v_$d = unpack_head(v[kv_at + $du]); var dk_$d = HeadValue(0.0); var dv_$d = HeadValue(0.0);
    let end = last_query((group.x + 1u) * LANES - 1u);
    for (var h = 0u; h < params.group; h += 1u) {
        let head = group.y * params.group + h;
        for (var query = group.x * LANES; query < end; query += 1u) {
            let at = (row0 + query) * params.q_stride + head * UNITS;
            var s = 0.0;
            var dp = 0.0;
            //#unroll d UNITS: let q_$d = unpack_head(q[at + $du]); let do_$d = unpack_head(dout[at + $du]); s += dot(k_$d, q_$d); dp += dot(v_$d, do_$d);
//#if SOFTCAP
            let t = tanh_of(s / params.softcap);
            s = params.softcap * t;
//#endif
            let sees = visible(query, key, segments[row0 + query], segment);
            let other = lse_delta[(row0 + query) * params.heads + head];
            let p = select(0.0, exp(min(s - other.x, 0.0)), sees);
            var ds = p * (dp - other.y);
//#if SOFTCAP
            ds *= 1.0 - t * t;
//#endif
            //#unroll d UNITS: dv_$d += p * do_$d; dk_$d += ds * q_$d;
        }
    }
    //#unroll d UNITS: dk[kv_at + $du] = pack_head(dk_$d * params.scale); dv[kv_at + $du] = pack_head(dv_$d);
    if (group.y == params.heads / params.group - 1u) {
        for (var d = 0u; d < params.pad_units; d += 1u) {
            dk[kv_at + UNITS + d] = pack_head(HeadValue(0.0));
            dv[kv_at + UNITS + d] = pack_head(HeadValue(0.0));
        }
    }
}
