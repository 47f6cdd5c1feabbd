// What a chunk's tokens are to one another, without the state: tokens and pairs, as
// common/gated_delta.wgsl has them. Both are overwritten.
//
// q, k (rows, key heads · key_dim), decay, beta (rows, value heads) float32. A workgroup takes a chunk
// of a value head, an invocation four tokens by four. Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl
//#include common/gated_delta_decay.wgsl
//#include common/gated_delta_inverse.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> segments: array<u32>;
//#input 2 q: 4
//#input 3 k: 4
@group(0) @binding(4) var<storage, read> decay: array<f32>;
@group(0) @binding(5) var<storage, read> beta: array<f32>;
@group(0) @binding(6) var<storage, read_write> tokens: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> pairs: array<vec4<f32>>;

const EPS = 1.0e-6;

var<workgroup> q_scale: array<f32, CHUNK>;
var<workgroup> k_scale: array<f32, CHUNK>;
var<workgroup> gain: array<f32, CHUNK>;

// A token's scales, decay and beta. What is padding or past the end has zeros for q and k: it writes
// nothing and asks for nothing.
fn read_token(index: u32, first: u32, row0: u32, head: u32, key_at: u32) {
    let t = first + index;
    let row = row0 + min(t, params.seq - 1u);
    let segment = segments[row];
    let counts = t < params.seq && segment != 0u;
    let begins = t == 0u || segments[max(row, 1u) - 1u] != segment;
    let at = row * params.key_stride + key_at;
    var q_squares = 0.0;
    var k_squares = 0.0;
    for (var d = 0u; d < params.key_units; d += 1u) {
        let x = load_q(at + d);
        let y = load_k(at + d);
        q_squares += dot(x, x);
        k_squares += dot(y, y);
    }
    let gate = row * params.gate_stride + head;
    let scale = inverseSqrt(f32(4u * params.key_units));
    q_scale[index] = select(0.0, scale * inverseSqrt(q_squares + EPS), counts);
    k_scale[index] = select(0.0, inverseSqrt(k_squares + EPS), counts);
    gain[index] = beta[gate];
    logs[index] = select(0.0, select(decay[gate], GONE, begins), counts);
}

fn write_token(index: u32, row: u32, head: u32) {
    var before = 0.0;
    var after = 0.0;
    for (var t = 0u; t < CHUNK; t += 1u) {
        before += select(0.0, logs[t], t <= index);
        after += select(0.0, logs[t], t > index);
    }
    let at = 2u * (row * params.heads + head);
    tokens[at] = vec4<f32>(q_scale[index], k_scale[index], gain[index], logs[index]);
    tokens[at + 1u] = vec4<f32>(kept(before), kept(after), select(0.0, 1.0, q_scale[index] > 0.0), 0.0);
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * CHUNK;
    let row0 = group.z * params.seq;
    let head = params.first_head + group.y;
    let key_at = head / params.group * params.key_units;
    let count = count_of(first);
    if (index < CHUNK) {
        read_token(index, first, row0, head, key_at);
    }
    workgroupBarrier();
    if (index < count) {
        write_token(index, row0 + first + index, group.y);
    }
    let i = 4u * (index / FOURS);
    let j = 4u * (index % FOURS);
    let stride = params.heads * PAIRS * FOURS;
    let pair_at = (row0 + first) * stride + group.y * PAIRS * FOURS;
    //#unroll r 4: var qk_$r = vec4<f32>(0.0); var kk_$r = vec4<f32>(0.0);
    if (j <= i) {
        //#unroll r 4: let at_$r = (row0 + first + min(i + $ru, count - 1u)) * params.key_stride + key_at;
        //#unroll r 4: let other_$r = (row0 + first + min(j + $ru, count - 1u)) * params.key_stride + key_at;
        for (var d = 0u; d < params.key_units; d += 1u) {
            let others = mat4x4<f32>(load_k(other_0 + d), load_k(other_1 + d), load_k(other_2 + d), load_k(other_3 + d));
            //#unroll r 4: qk_$r += load_q(at_$r + d) * others; kk_$r += load_k(at_$r + d) * others;
        }
        let gamma = decays(i, j);
        let scales = vec4<f32>(k_scale[j], k_scale[j + 1u], k_scale[j + 2u], k_scale[j + 3u]);
        //#unroll r 4
            qk_$r *= q_scale[i + $ru] * scales * gamma[$r];
            kk_$r *= k_scale[i + $ru] * scales * gamma[$r];
            kk_$r = select(vec4<f32>(0.0), kk_$r, vec4<u32>(i + $ru) > vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u));
        //#end
        //#unroll r 4, c 4: if (i + $ru > j + $cu) { lower[place(i + $ru, j + $cu)] = gain[i + $ru] * kk_$r[$c]; }
    }
    //#unroll r 4
    if (i + $ru < count) {
        pairs[pair_at + (i + $ru) * stride + FOURS + j / 4u] = qk_$r;
//#if GRADIENT
        pairs[pair_at + (i + $ru) * stride + 2u * FOURS + j / 4u] = kk_$r;
//#endif
    }
    //#end
    workgroupBarrier();
    invert(index);
    //#unroll r 4
    if (i + $ru < count) {
        var row_$r = vec4<f32>(0.0);
        //#unroll c 4: if (i + $ru == j + $cu) { row_$r[$c] = 1.0; } else if (i + $ru > j + $cu) { row_$r[$c] = lower[place(i + $ru, j + $cu)]; }
        pairs[pair_at + (i + $ru) * stride + j / 4u] = row_$r;
    }
    //#end
}
