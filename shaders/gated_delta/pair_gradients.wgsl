// What a chunk's pairs of tokens pass on, with X = x · v'ᵀ and dP = do · v'ᵀ, dA = -X below the diagonal:
//
// dpairs[0] = dP ⊙ Γ,  dpairs[1] = dA ⊙ beta · Γ below the diagonal,
// and of M = dP ⊙ P + dA ⊙ A below the diagonal: partial[3] of token t = Σ_{i ≥ t > j} M_ij, and
// partial[4] of token i = Σ_j dA_ij · N_ij + x_i · v_i.
//
// dout, v (rows, value heads · value_dim); dpairs (rows, heads, 2, CHUNK) and partial (rows, heads, 8)
// float32 are overwritten, the rest as in gated_delta/states.wgsl. A workgroup takes a chunk of a head,
// an invocation four tokens by four. Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl
//#include common/gated_delta_decay.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> pairs: array<vec4<f32>>;
//#input 3 v: 4
//#input 4 dout: 4
@group(0) @binding(5) var<storage, read> made: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> dpairs: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> partial: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * CHUNK;
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let value_at = (params.first_head + group.y) * params.value_units;
    if (index < CHUNK) {
        let token = tokens[2u * ((row0 + min(index, count - 1u)) * params.heads + group.y)];
        logs[index] = select(0.0, token.w, index < count);
    }
    workgroupBarrier();
    let i = 4u * (index / FOURS);
    let j = 4u * (index % FOURS);
    let stride = params.heads * PAIRS * FOURS;
    let out_stride = params.heads * 2u * FOURS;
    let out_at = row0 * out_stride + group.y * 2u * FOURS + j / 4u;
    //#unroll r 4: var p_$r = vec4<f32>(0.0); var a_$r = vec4<f32>(0.0); var n_$r = vec4<f32>(0.0);
    if (j <= i) {
        //#unroll r 4
            let row_$r = row0 + min(i + $ru, count - 1u);
            let dout_$r = row_$r * params.value_stride + value_at;
            let x_$r = (2u * (row_$r * params.heads + group.y) + 1u) * params.value_units;
            let other_$r = 2u * ((row0 + min(j + $ru, count - 1u)) * params.heads + group.y) * params.value_units;
        //#end
        for (var d = 0u; d < params.value_units; d += 1u) {
            let others = mat4x4<f32>(made[other_0 + d], made[other_1 + d], made[other_2 + d], made[other_3 + d]);
            //#unroll r 4: p_$r += load_dout(dout_$r + d) * others; a_$r -= made[x_$r + d] * others;
        }
        let gamma = decays(i, j);
        //#unroll r 4
        {
            let below = vec4<u32>(i + $ru) > vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u);
            let gain = tokens[2u * (row_$r * params.heads + group.y)].z;
            let at = row_$r * stride + group.y * PAIRS * FOURS + j / 4u;
            a_$r = select(vec4<f32>(0.0), a_$r, below);
            n_$r = a_$r * pairs[at + 2u * FOURS];
            let sum = p_$r * pairs[at + FOURS] + gain * n_$r;
            p_$r *= gamma[$r];
            a_$r *= gain * gamma[$r];
            //#unroll c 4: if (i + $ru > j + $cu) { lower[place(i + $ru, j + $cu)] = sum[$c]; }
        }
        //#end
    }
    //#unroll r 4
    if (i + $ru < count) {
        dpairs[out_at + (i + $ru) * out_stride] = p_$r;
        dpairs[out_at + (i + $ru) * out_stride + FOURS] = a_$r;
    }
    //#end
    workgroupBarrier();
    // Each row up to its columns, then of those the rows from a token on.
    if (index < count) {
        var sum = 0.0;
        for (var t = 0u; t < index; t += 1u) {
            sum += lower[place(index, t)];
            lower[place(index, t)] = sum;
        }
    }
    workgroupBarrier();
    let partial_at = 8u * ((row0 + min(index, count - 1u)) * params.heads + group.y);
    if (index < count) {
        var sum = 0.0;
        if (index > 0u) {
            for (var t = index; t < count; t += 1u) {
                sum += lower[place(t, index - 1u)];
            }
        }
        partial[partial_at + 3u] = sum;
    }
    workgroupBarrier();
    if (j <= i) {
        //#unroll r 4, c 4: if (i + $ru > j + $cu) { lower[place(i + $ru, j + $cu)] = n_$r[$c]; }
    }
    workgroupBarrier();
    if (index < count) {
        var sum = 0.0;
        for (var t = 0u; t < index; t += 1u) {
            sum += lower[place(index, t)];
        }
        let row = row0 + index;
        let x_at = (2u * (row * params.heads + group.y) + 1u) * params.value_units;
        for (var d = 0u; d < params.value_units; d += 1u) {
            sum += dot(made[x_at + d], load_v(row * params.value_stride + value_at + d));
        }
        partial[partial_at + 4u] = sum;
    }
}
