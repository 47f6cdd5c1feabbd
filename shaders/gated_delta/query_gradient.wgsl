// dq̂ = into · Z + dpairs[0] · k̂,  Z = do · Sᵀ,  and partial[0] = q̂ · Z  of each token.
//
// dkeys[0] (rows, heads, 2, key_dim) float32, which is dq̂ of each value head, and partial[0] are
// overwritten; the rest as in gated_delta/pair_gradients.wgsl. A workgroup takes a chunk of a head, an
// invocation four tokens by a unit of columns at a time. Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl
//#include common/gated_delta_reduce.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
//#input 2 q: 4
//#input 3 k: 4
//#input 4 dout: 4
@group(0) @binding(5) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> dpairs: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> dkeys: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> partial: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = index % LANES;
    let four = index / LANES;
    let i = 4u * four;
    let first = group.x * CHUNK;
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let head = params.first_head + group.y;
    let key_at = head / params.group * params.key_units;
    let value_at = head * params.value_units;
    let state_at = 2u * ((group.z * params.heads + group.y) * params.chunks + group.x) * 4u * params.key_units;
    //#unroll r 4
        let row_$r = row0 + min(i + $ru, count - 1u);
        let token_$r = tokens[2u * (row_$r * params.heads + group.y)];
        let into_$r = tokens[2u * (row_$r * params.heads + group.y) + 1u].x;
        let pair_$r = (row_$r * params.heads + group.y) * 2u * FOURS;
    //#end
    var told = vec4<f32>(0.0);
    for (var unit = lane; unit < params.key_units; unit += LANES) {
        //#unroll r 4: var sum_$r = vec4<f32>(0.0); let dout_$r = row_$r * params.value_stride + value_at;
        let at = (state_at + 4u * unit) * params.value_units;
        for (var d = 0u; d < params.value_units; d += 1u) {
            let rows = mat4x4<f32>(states[at + d], states[at + params.value_units + d], states[at + 2u * params.value_units + d], states[at + 3u * params.value_units + d]);
            //#unroll r 4: sum_$r += load_dout(dout_$r + d) * rows;
        }
        //#unroll r 4: told[$r] += token_$r.x * dot(load_q(row_$r * params.key_stride + key_at + unit), sum_$r); sum_$r *= into_$r;
        for (var m = 0u; m <= four; m += 1u) {
            //#unroll c 4: let other_$c = row0 + min(4u * m + $cu, count - 1u); let scale_$c = tokens[2u * (other_$c * params.heads + group.y)].y; let key_$c = scale_$c * load_k(other_$c * params.key_stride + key_at + unit);
            let others = mat4x4<f32>(key_0, key_1, key_2, key_3);
            //#unroll r 4: sum_$r += others * dpairs[pair_$r + m];
        }
        //#unroll r 4: if (i + $ru < count) { dkeys[2u * (row_$r * params.heads + group.y) * params.key_units + unit] = sum_$r; }
    }
    let sum = sum_over_lanes(index, told);
    if (lane == 0u) {
        //#unroll r 4: if (i + $ru < count) { partial[8u * (row_$r * params.heads + group.y)] = sum[$r]; }
    }
}
