// Chunk after chunk from the last with the gradient dS of the state after it:
//
// u_j = out of_j · dSᵀ·B_j + Σ_{i ≥ j} pairs_ij · dy_i,  dx_j = dt_j · u_j + D · dy_j,
// dS = kept · dS + Σ_i into_i · C_i ⊗ dy_i
//
// dy, dx (rows, heads of all · head_dim); dx and states[1], which is dS after each chunk, are overwritten; the
// rest as in mamba_scan/states.wgsl. Launcher: kernels/mamba_scan.py.
//#include common/mamba_scan.wgsl
//#include common/mamba_state.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> pairs: array<vec4<f32>>;
//#input 3 bc: 4
//#input 5 dy: 4
//#output 7 dx: 4
@group(0) @binding(8) var<storage, read_write> states: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = index % LANES;
    let four = index / LANES;
    let i = 4u * four;
    let column = group.x * LANES + lane;
    let inside = column < params.head_units;
    let head = params.first_head + group.y;
    let group_at = head / params.group * params.state_units;
    let own_at = head * params.head_units + min(column, params.head_units - 1u);
    let size = 4u * params.state_units;
    for (var at = index; at < size * LANES; at += THREADS) {
        state[at] = vec4<f32>(0.0);
    }
    for (var past = 1u; past <= params.chunks; past += 1u) {
        let chunk = params.chunks - past;
        let first = chunk * CHUNK;
        let count = count_of(first);
        let row0 = group.z * params.seq + first;
        read_weights(index, row0, group.y, count);
        workgroupBarrier();
        let state_at = (2u * ((group.z * params.heads + group.y) * params.chunks + chunk) + 1u) * size;
        for (var at = index; at < size * LANES; at += THREADS) {
            let unit = group.x * LANES + at % LANES;
            if (unit < params.head_units) {
                states[(state_at + at / LANES) * params.head_units + unit] = state[at];
            }
        }
        //#unroll r 4
            let row_$r = row0 + min(i + $ru, count - 1u);
            let at_$r = row_$r * params.state_stride + group_at;
            let dy_$r = load_dy(row_$r * params.head_stride + own_at);
            values[(i + $ru) * LANES + lane] = dy_$r;
            var sum_$r = vec4<f32>(0.0);
        //#end
        workgroupBarrier();
        for (var n = 0u; n < params.state_units; n += 1u) {
            let columns = of_state(n, lane);
            //#unroll r 4: sum_$r += columns * load_bc(at_$r + n);
        }
        //#unroll r 4: sum_$r *= weights[i + $ru].z;
        for (var t = i; t < count; t += 1u) {
            let pair = pairs[((row0 + t) * params.heads + group.y) * FOURS + four];
            let gradient = values[t * LANES + lane];
            //#unroll r 4: sum_$r += pair[$r] * gradient;
        }
        //#unroll r 4: if (inside && i + $ru < count) { store_dx(row_$r * params.head_stride + own_at, weights[i + $ru].x * sum_$r + weights[i + $ru].w * dy_$r); }
        workgroupBarrier();
        let keep = kept_of_state(row0, group.y);
        for (var block = index; block < params.state_units * LANES; block += THREADS) {
            let unit = block / LANES;
            let own = block % LANES;
            let at = 4u * unit * LANES + own;
            //#unroll n 4: var next_$n = keep * state[at + $nu * LANES];
            for (var t = 0u; t < count; t += 1u) {
                let query = weights[t].y * load_bc(params.c_at + (row0 + t) * params.state_stride + group_at + unit);
                let gradient = values[t * LANES + own];
                //#unroll n 4: next_$n += query[$n] * gradient;
            }
            //#unroll n 4: state[at + $nu * LANES] = next_$n;
        }
        workgroupBarrier();
    }
}
