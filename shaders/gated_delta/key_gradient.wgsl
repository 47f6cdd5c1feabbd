// dk̂ = out of · Y - beta · into · Z + dpairs[0]ᵀ · q̂ + (dpairs[1] + dpairs[1]ᵀ) · k̂,  Z = x · Sᵀ,
// Y = v' · dSᵀ,  and partial[1] = k̂ · Z, partial[2] = k̂ · Y  of each token.
//
// dkeys[1], which is dk̂ of each value head, and partial[1], partial[2] are overwritten; the rest as in
// gated_delta/query_gradient.wgsl. Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl
//#include common/gated_delta_reduce.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
//#input 2 q: 4
//#input 3 k: 4
@group(0) @binding(4) var<storage, read> made: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> dpairs: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> dkeys: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> partial: array<f32>;

// Four rows of S or dS that lie below one another, one unit of their columns.
fn rows_of(at: u32) -> mat4x4<f32> {
    let next = params.value_units;
    return mat4x4<f32>(states[at], states[at + next], states[at + 2u * next], states[at + 3u * next]);
}

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
    let size = 4u * params.key_units;
    let state_at = 2u * ((group.z * params.heads + group.y) * params.chunks + group.x) * size;
    //#unroll r 4
        let row_$r = row0 + min(i + $ru, count - 1u);
        let token_at_$r = 2u * (row_$r * params.heads + group.y);
        let made_$r = token_at_$r * params.value_units;
        let pair_$r = token_at_$r * FOURS;
    //#end
    var told = vec4<f32>(0.0);
    var given = vec4<f32>(0.0);
    for (var unit = lane; unit < params.key_units; unit += LANES) {
        let key_unit = key_at + unit;
        //#unroll r 4: var sum_$r = vec4<f32>(0.0); var next_$r = vec4<f32>(0.0);
        let before = (state_at + 4u * unit) * params.value_units;
        let after = before + size * params.value_units;
        for (var d = 0u; d < params.value_units; d += 1u) {
            let rows = rows_of(before + d);
            //#unroll r 4: sum_$r += made[made_$r + params.value_units + d] * rows;
        }
        for (var d = 0u; d < params.value_units; d += 1u) {
            let rows = rows_of(after + d);
            //#unroll r 4: next_$r += made[made_$r + d] * rows;
        }
        //#unroll r 4
            let token_$r = tokens[token_at_$r];
            let ends_$r = tokens[token_at_$r + 1u];
            let key_$r = token_$r.y * load_k(row_$r * params.key_stride + key_unit);
            told[$r] += dot(key_$r, sum_$r);
            given[$r] += dot(key_$r, next_$r);
            sum_$r = ends_$r.y * next_$r - token_$r.z * ends_$r.x * sum_$r;
        //#end
        for (var t = i; t < count; t += 1u) {
            let row = row0 + t;
            let token = tokens[2u * (row * params.heads + group.y)];
            let query = token.x * load_q(row * params.key_stride + key_unit);
            let key = token.y * load_k(row * params.key_stride + key_unit);
            let pair = (row * params.heads + group.y) * 2u * FOURS + four;
            let of_query = dpairs[pair];
            let of_key = dpairs[pair + FOURS];
            //#unroll r 4: sum_$r += of_query[$r] * query + of_key[$r] * key;
        }
        for (var m = 0u; m <= four; m += 1u) {
            //#unroll c 4: let other_$c = row0 + min(4u * m + $cu, count - 1u); let scale_$c = tokens[2u * (other_$c * params.heads + group.y)].y; let near_$c = scale_$c * load_k(other_$c * params.key_stride + key_unit);
            let others = mat4x4<f32>(near_0, near_1, near_2, near_3);
            //#unroll r 4: sum_$r += others * dpairs[pair_$r + FOURS + m];
        }
        //#unroll r 4: if (i + $ru < count) { dkeys[(token_at_$r + 1u) * params.key_units + unit] = sum_$r; }
    }
    let told_sum = sum_over_lanes(index, told);
    let given_sum = sum_over_lanes(index, given);
    if (lane == 0u) {
        //#unroll r 4
            let partial_$r = 4u * token_at_$r;
            if (i + $ru < count) {
                partial[partial_$r + 1u] = told_sum[$r];
                partial[partial_$r + 2u] = given_sum[$r];
            }
        //#end
    }
}
