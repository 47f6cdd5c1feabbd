// dC_i = Σ_heads into_i · S·dy_i + Σ_j dpairs_ij · B_j,  dB_j = Σ_heads dt_j · out of_j · dS·x_j + Σ_i dpairs_ij · C_i
// over the heads that share B and C, and for each of them and each part of a state's rows
// far[0] = into_i · C_i·(S·dy_i),  far[1] = out of_i · B_i·(dS·x_i).
//
// x, dy (rows, heads of all · head_dim), dpairs like pairs, dbc like bc; far (rows, heads, parts, 2) is
// overwritten; dbc, float32, too, or (ACCUMULATE) added to. A workgroup takes
// LANES units of a group's columns of a chunk, an invocation four tokens by a unit; `members` heads of the
// launch share a group, parts · LANES ≥ state_units. Launcher: kernels/mamba_scan.py.
//#include common/mamba_scan.wgsl
//#include common/gated_delta_reduce.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
//#input 2 bc: 4
//#input 4 x: 4
//#input 5 dy: 4
@group(0) @binding(6) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> dpairs: array<vec4<f32>>;
//#output 8 dbc: 4 sum
@group(0) @binding(10) var<storage, read_write> far: array<vec2<f32>>;

// Four rows of S or dS that lie below one another, one unit of their columns.
fn rows_of(at: u32) -> mat4x4<f32> {
    let next = params.head_units;
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
    let part = group.y % PARTS;
    let members = min(params.group, params.heads);
    let member0 = group.y / PARTS * members;
    let inside = part * LANES + lane < params.state_units;
    let unit = min(part * LANES + lane, params.state_units - 1u);
    let group_at = (params.first_head + member0) / params.group * params.state_units + unit;
    let size = 4u * params.state_units;
    //#unroll r 4
        let row_$r = row0 + min(i + $ru, count - 1u);
        var db_$r = vec4<f32>(0.0);
        var dc_$r = vec4<f32>(0.0);
    //#end
    for (var member = member0; member < member0 + members; member += 1u) {
        let own_at = (params.first_head + member) * params.head_units;
        let before = (2u * ((group.z * params.heads + member) * params.chunks + group.x) * size + 4u * unit) * params.head_units;
        let after = before + size * params.head_units;
        // First S for dC, then dS for dB: both at once would need more registers than some GPUs have.
        //#unroll r 4: var told_$r = vec4<f32>(0.0);
        for (var p = 0u; p < params.head_units; p += 1u) {
            let rows = rows_of(before + p);
            //#unroll r 4: told_$r += load_dy(row_$r * params.head_stride + own_at + p) * rows;
        }
        var by_c = vec4<f32>(0.0);
        //#unroll r 4
            told_$r *= tokens[2u * (row_$r * params.heads + member)].z;
            by_c[$r] = dot(load_bc(params.c_at + row_$r * params.state_stride + group_at), told_$r);
            dc_$r += told_$r;
            told_$r = vec4<f32>(0.0);
        //#end
        for (var p = 0u; p < params.head_units; p += 1u) {
            let rows = rows_of(after + p);
            //#unroll r 4: told_$r += load_x(row_$r * params.head_stride + own_at + p) * rows;
        }
        var by_b = vec4<f32>(0.0);
        //#unroll r 4
            let token_$r = tokens[2u * (row_$r * params.heads + member)];
            told_$r *= token_$r.w;
            by_b[$r] = dot(load_bc(row_$r * params.state_stride + group_at), told_$r);
            db_$r += token_$r.y * told_$r;
        //#end
        by_c = sum_over_lanes(index, select(vec4<f32>(0.0), by_c, inside));
        by_b = sum_over_lanes(index, select(vec4<f32>(0.0), by_b, inside));
        if (lane == 0u) {
            //#unroll r 4: if (i + $ru < count) { far[(row_$r * params.heads + member) * PARTS + part] = vec2<f32>(by_c[$r], by_b[$r]); }
        }
        for (var m = 0u; m <= four; m += 1u) {
            //#unroll c 4: let near_$c = load_bc((row0 + min(4u * m + $cu, count - 1u)) * params.state_stride + group_at);
            let others = mat4x4<f32>(near_0, near_1, near_2, near_3);
            //#unroll r 4: dc_$r += others * dpairs[(row_$r * params.heads + member) * FOURS + m];
        }
        for (var t = i; t < count; t += 1u) {
            let row = row0 + t;
            let query = load_bc(params.c_at + row * params.state_stride + group_at);
            let pair = dpairs[(row * params.heads + member) * FOURS + four];
            //#unroll r 4: db_$r += pair[$r] * query;
        }
    }
    if (inside) {
        //#unroll r 4
            if (i + $ru < count) {
                store_dbc(row_$r * params.state_stride + group_at, db_$r);
                store_dbc(params.c_at + row_$r * params.state_stride + group_at, dc_$r);
            }
        //#end
    }
}
