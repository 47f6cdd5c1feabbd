// dpairs_ij = Γ_ij · dt_j · (dy_i·x_j) for j ≤ i, which multiplies C_i·B_j, and for each token t
// near[0] = Σ_i pairs_it · (dy_i·x_t),  near[1] = Σ_{i ≥ t > j} pairs_ij · dt_j · (dy_i·x_j).
//
// x, dy (rows, heads of all · head_dim), tokens, pairs as common/mamba_scan.wgsl has them; dpairs, like pairs,
// and near (rows, heads, 2) are overwritten. A workgroup takes a chunk of a head, an invocation four tokens
// by four. Launcher: kernels/mamba_scan.py.
//#include common/mamba_scan.wgsl
//#include common/gated_delta_decay.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> pairs: array<vec4<f32>>;
//#input 3 x: 4
//#input 4 dy: 4
@group(0) @binding(5) var<storage, read_write> dpairs: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> near: array<vec2<f32>>;

var<workgroup> sizes: array<f32, CHUNK>;
var<workgroup> counts: array<f32, CHUNK>;
var<workgroup> diagonal: array<f32, CHUNK>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * CHUNK;
    let count = count_of(first);
    let row0 = group.z * params.seq + first;
    let own_at = (params.first_head + group.y) * params.head_units;
    for (var t = index; t < CHUNK; t += THREADS) {
        let at = 2u * ((row0 + min(t, count - 1u)) * params.heads + group.y);
        logs[t] = select(0.0, tokens[at].x, t < count);
        sizes[t] = select(0.0, tokens[at].y, t < count);
        counts[t] = select(0.0, tokens[at + 1u].x, t < count);
    }
    workgroupBarrier();
    let i = 4u * (index / FOURS);
    let j = 4u * (index % FOURS);
    //#unroll r 4: var sum_$r = vec4<f32>(0.0);
    if (j <= i) {
        //#unroll r 4: let at_$r = (row0 + min(i + $ru, count - 1u)) * params.head_stride + own_at;
        //#unroll r 4: let other_$r = (row0 + min(j + $ru, count - 1u)) * params.head_stride + own_at;
        for (var p = 0u; p < params.head_units; p += 1u) {
            let others = mat4x4<f32>(load_x(other_0 + p), load_x(other_1 + p), load_x(other_2 + p), load_x(other_3 + p));
            //#unroll r 4: sum_$r += load_dy(at_$r + p) * others;
        }
        let own = vec4<f32>(sizes[j], sizes[j + 1u], sizes[j + 2u], sizes[j + 3u]);
        let gamma = decays(i, j);
        //#unroll r 4
            if (i + $ru < count) {
                let product = sum_$r * pairs[((row0 + i + $ru) * params.heads + group.y) * FOURS + j / 4u];
                //#unroll c 4: if (i + $ru > j + $cu) { lower[place(i + $ru, j + $cu)] = product[$c]; } else if (i + $ru == j + $cu) { diagonal[i + $ru] = product[$c]; }
            }
            sum_$r *= counts[i + $ru] * own * gamma[$r];
        //#end
    }
    //#unroll r 4: if (i + $ru < count) { dpairs[((row0 + i + $ru) * params.heads + group.y) * FOURS + j / 4u] = sum_$r; }
    workgroupBarrier();
    for (var t = index; t < count; t += THREADS) {
        var direct = diagonal[t];
        var across = 0.0;
        for (var later = t; later < count; later += 1u) {
            if (later > t) {
                direct += lower[place(later, t)];
            }
            for (var earlier = 0u; earlier < t; earlier += 1u) {
                across += lower[place(later, earlier)] * sizes[earlier];
            }
        }
        near[(row0 + t) * params.heads + group.y] = vec2<f32>(direct, across);
    }
}
