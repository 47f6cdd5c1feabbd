// Chunk after chunk with the state S that the one before leaves (Dao & Gu, 2024):
//
// y_i = into_i · Sᵀ·C_i + Σ_{j ≤ i} pairs_ij · dt_j · x_j + D · x_i,  S = kept · S + Σ_j out of_j · B_j ⊗ dt_j · x_j
//
// x, y (rows, heads of all · head_dim), bc, tokens, pairs and states as common/mamba_scan.wgsl has them; y, last[places[0]] (heads of all, state_size, head_dim)
// and states[0] are overwritten as far as bound. A workgroup takes LANES units of a head's columns.
// Launcher: kernels/mamba_scan.py.
//#include common/mamba_scan.wgsl
//#include common/mamba_state.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
//#input 2 bc: 4
//#input 3 x: 4
//#if y
@group(0) @binding(4) var<storage, read> pairs: array<vec4<f32>>;
//#output 7 y: 4
//#endif
//#output 8 last?: 4 float32
//#if last
@group(0) @binding(9) var<storage, read> places: array<u32>;
//#endif
//#if states
@group(0) @binding(10) var<storage, read_write> states: array<vec4<f32>>;
//#endif

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
    for (var chunk = 0u; chunk < params.chunks; chunk += 1u) {
        let first = chunk * CHUNK;
        let count = count_of(first);
        let row0 = group.z * params.seq + first;
        read_weights(index, row0, group.y, count);
        workgroupBarrier();
//#if states
        let state_at = 2u * ((group.z * params.heads + group.y) * params.chunks + chunk) * size;
        for (var at = index; at < size * LANES; at += THREADS) {
            let unit = group.x * LANES + at % LANES;
            if (unit < params.head_units) {
                states[(state_at + at / LANES) * params.head_units + unit] = state[at];
            }
        }
//#endif
        //#unroll r 4
            let row_$r = row0 + min(i + $ru, count - 1u);
            let x_$r = load_x(row_$r * params.head_stride + own_at);
            values[(i + $ru) * LANES + lane] = weights[i + $ru].x * x_$r;
        //#end
        workgroupBarrier();
//#if y
        //#unroll r 4: let at_$r = row_$r * params.state_stride + group_at; var sum_$r = vec4<f32>(0.0);
        for (var n = 0u; n < params.state_units; n += 1u) {
            let columns = of_state(n, lane);
            //#unroll r 4: sum_$r += columns * load_bc(params.c_at + at_$r + n);
        }
        //#unroll r 4: sum_$r *= weights[i + $ru].y; let pairs_$r = (row_$r * params.heads + group.y) * FOURS;
        for (var m = 0u; m <= four; m += 1u) {
            let at = 4u * m * LANES + lane;
            let rows = mat4x4<f32>(values[at], values[at + LANES], values[at + 2u * LANES], values[at + 3u * LANES]);
            //#unroll r 4: sum_$r += rows * pairs[pairs_$r + m];
        }
        //#unroll r 4: if (inside && i + $ru < count) { store_y(row_$r * params.head_stride + own_at, sum_$r + weights[i + $ru].w * x_$r); }
        workgroupBarrier();
//#endif
        let keep = kept_of_state(row0, group.y);
        for (var block = index; block < params.state_units * LANES; block += THREADS) {
            let unit = block / LANES;
            let own = block % LANES;
            let at = 4u * unit * LANES + own;
            //#unroll n 4: var next_$n = keep * state[at + $nu * LANES];
            // Past the last token weights are zero.
            for (var t = 0u; t < count; t += 1u) {
                let key = weights[t].z * load_bc((row0 + t) * params.state_stride + group_at + unit);
                let value = values[t * LANES + own];
                //#unroll n 4: next_$n += key[$n] * value;
            }
            //#unroll n 4: state[at + $nu * LANES] = next_$n;
        }
        workgroupBarrier();
    }
//#if last
    for (var at = index; at < size * LANES; at += THREADS) {
        let unit = group.x * LANES + at % LANES;
        if (unit < params.head_units) {
            store_last(((places[0] * (params.head_stride / params.head_units) + head) * size + at / LANES) * params.head_units + unit, state[at]);
        }
    }
//#endif
}
