// dq = scale · Σ_key ds · k,  ds = p · (do·v - delta),  p = exp(scale · q·k - lse).
//
// q, dout, dq (batch · seq, heads · head_dim), k, v (batch · seq, kv_heads · head_dim) operands,
// lse_delta (batch · seq, heads) of float32 pairs, segments (batch · seq).
// dq is overwritten. One invocation holds one query of one head. Launcher: ops/attention.py.
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
@group(0) @binding(7) var<storage, read_write> dq: array<HeadUnit>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let query = group.x * LANES + local.x;
    if (query >= params.seq) {
        return;
    }
    let head = group.y;
    let row0 = group.z * params.seq;
    let q_base = (row0 + query) * params.q_stride + head * UNITS;
    let kv_base = row0 * params.kv_stride + (head / params.group) * UNITS;
    let segment = segments[row0 + query];
    let own = lse_delta[(row0 + query) * params.heads + head];
    let end = min(params.seq, (group.x + 1u) * LANES);
    let begin = max(first_key(group.x * LANES), sample_begin(row0, group.x * LANES, end - 1u));
    //#unroll d UNITS: let q_$d = unpack_head(q[q_base + $du]) * params.scale; let do_$d = unpack_head(dout[q_base + $du]); var dq_$d = HeadValue(0.0);
    for (var key = begin; key < end; key += 1u) {
        let at = kv_base + key * params.kv_stride;
        var s = 0.0;
        var dp = 0.0;
        //#unroll d UNITS: let k_$d = unpack_head(k[at + $du]); s += dot(q_$d, k_$d); dp += dot(do_$d, unpack_head(v[at + $du]));
//#if SOFTCAP
        let t = tanh_of(s / params.softcap);
        s = params.softcap * t;
//#endif
        let sees = visible(query, key, segment, segments[row0 + key]);
        let p = select(0.0, exp(min(s - own.x, 0.0)), sees);
        var ds = p * (dp - own.y);
//#if SOFTCAP
        ds *= 1.0 - t * t;
//#endif
        //#unroll d UNITS: dq_$d += ds * k_$d;
    }
    //#unroll d UNITS: dq[q_base + $du] = pack_head(dq_$d * params.scale);
    if (head == params.heads - 1u) {
        for (var d = 0u; d < params.pad_units; d += 1u) {
            dq[q_base + UNITS + d] = pack_head(HeadValue(0.0));
        }
    }
}
