// o = softmax(scale · q·kᵀ + mask) · v  and  lse = log Σ exp(scale · q·kᵀ + mask), causal, with
// grouped keys and values, after FlashAttention (Dao et al., 2022): scores never exist whole.
//
// q, o (batch · seq, heads · head_dim), k, v (batch · seq, kv_heads · head_dim) operands,
// segments (batch · seq), lse (batch · seq, heads) float32. o and lse are overwritten; a query that
// sees no key gets o = 0 and a large lse. One invocation holds one query of one head and walks
// KEYS keys a turn. Launcher: ops/attention.py.
//#include common/head_unit.wgsl
//#include common/attention_mask.wgsl
//#include common/log.wgsl

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
@group(0) @binding(5) var<storage, read_write> o: array<HeadUnit>;
@group(0) @binding(6) var<storage, read_write> lse: array<f32>;

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
    let end = min(params.seq, (group.x + 1u) * LANES);
    let begin = max(first_key(group.x * LANES), sample_begin(row0, group.x * LANES, end - 1u));
    //#unroll d UNITS: let q_$d = unpack_head(q[q_base + $du]) * params.scale; var o_$d = HeadValue(0.0);
    var top = -3.0e38;
    var sum = 0.0;
    for (var key = begin; key < end; key += KEYS) {
        //#unroll c KEYS: let key_$c = min(key + $cu, params.seq - 1u); let at_$c = kv_base + key_$c * params.kv_stride; let sees_$c = key + $cu < params.seq && visible(query, key + $cu, segment, segments[row0 + key_$c]); var s_$c = 0.0;
        //#unroll c KEYS, d UNITS: s_$c += dot(q_$d, unpack_head(k[at_$c + $du]));
//#if SOFTCAP
        //#unroll c KEYS: s_$c = params.softcap * tanh_of(s_$c / params.softcap);
//#endif
        var next = top;
        //#unroll c KEYS: next = max(next, select(-3.0e38, s_$c, sees_$c));
        let shrink = exp(top - next);
        top = next;
        //#unroll c KEYS: let p_$c = select(0.0, exp(min(s_$c - top, 0.0)), sees_$c);
        sum *= shrink;
        //#unroll c KEYS: sum += p_$c;
        //#unroll d UNITS: o_$d *= shrink;
        //#unroll c KEYS, d UNITS: o_$d += p_$c * unpack_head(v[at_$c + $du]);
    }
    let lse_at = (row0 + query) * params.heads + head;
    if (sum > 0.0) {
        lse[lse_at] = top + accurate_log(sum);
    } else {
        lse[lse_at] = 3.0e38;
    }
    let share = select(0.0, 1.0 / sum, sum > 0.0);
    //#unroll d UNITS: o[q_base + $du] = pack_head(o_$d * share);
    if (head == params.heads - 1u) {
        for (var d = 0u; d < params.pad_units; d += 1u) {
            o[q_base + UNITS + d] = pack_head(HeadValue(0.0));
        }
    }
}
