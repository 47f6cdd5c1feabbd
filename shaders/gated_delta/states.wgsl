// Chunk after chunk with the state S that the one before leaves (Yang et al., 2024, in chunks):
//
// v' = T · beta · (v - into · k̂ · S),  o = into · q̂ · S + P · v',  S = kept · S + (out of · k̂)ᵀ · v'
//
// q, k (rows, key heads · key_dim), v, o (rows, value heads · value_dim), tokens and pairs as
// common/gated_delta.wgsl has them; o, last[places[0]] (value heads, key_dim, value_dim), states[0] (sequences,
// heads, chunks, 2, key_dim, value_dim), which is S before each chunk, and made[0] (rows, heads, 2,
// value_dim), which is v', overwritten as far as bound. A workgroup takes LANES units of a head's
// columns. Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl
//#include common/gated_delta_state.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> pairs: array<vec4<f32>>;
//#input 3 k: 4
//#input 4 v: 4
//#if o
//#input 5 q: 4
//#output 6 o: 4
//#endif
//#output 7 last?: 4 float32
//#if last
@group(0) @binding(10) var<storage, read> places: array<u32>;
//#endif
//#if made
@group(0) @binding(8) var<storage, read_write> made: array<vec4<f32>>;
@group(0) @binding(9) var<storage, read_write> states: array<vec4<f32>>;
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = index % LANES;
    let four = index / LANES % FOURS;
    let is_first = index < FOURS * LANES;
    let i = 4u * four;
    let column = group.x * LANES + lane;
    let inside = column < params.value_units;
    let head = params.first_head + group.y;
    let key_at = head / params.group * params.key_units;
    let value_at = head * params.value_units + min(column, params.value_units - 1u);
    let size = 4u * params.key_units;
    let stride = params.heads * PAIRS * FOURS;
    for (var at = index; at < size * LANES; at += THREADS) {
        state[at] = vec4<f32>(0.0);
    }
    for (var chunk = 0u; chunk < params.chunks; chunk += 1u) {
        let first = chunk * CHUNK;
        let count = count_of(first);
        let row0 = group.z * params.seq + first;
        let pair_at = group.y * PAIRS * FOURS;
        read_weights(index, row0, group.y, count);
        workgroupBarrier();
//#if made
        let state_at = 2u * ((group.z * params.heads + group.y) * params.chunks + chunk) * size;
        for (var at = index; at < size * LANES; at += THREADS) {
            let unit = group.x * LANES + at % LANES;
            if (unit < params.value_units) {
                states[(state_at + at / LANES) * params.value_units + unit] = state[at];
            }
        }
//#endif
        //#unroll r 4
            let row_$r = row0 + min(i + $ru, count - 1u);
            let at_$r = row_$r * params.key_stride + key_at;
            let pairs_$r = row_$r * stride + pair_at;
            var sum_$r = vec4<f32>(0.0);
        //#end
//#if o
        // The first invocations have what keys are told by the state, the others what queries are.
        if (is_first) {
            for (var d = 0u; d < params.key_units; d += 1u) {
                let columns = of_state(d, lane);
                //#unroll r 4: sum_$r += columns * load_k(at_$r + d);
            }
        } else {
            for (var d = 0u; d < params.key_units; d += 1u) {
                let columns = of_state(d, lane);
                //#unroll r 4: sum_$r += columns * load_q(at_$r + d);
            }
            //#unroll r 4: sum_$r *= weights[i + $ru].x;
        }
//#else
        let half = params.key_units / 2u;
        for (var d = select(half, 0u, is_first); d < select(params.key_units, half, is_first); d += 1u) {
            let columns = of_state(d, lane);
            //#unroll r 4: sum_$r += columns * load_k(at_$r + d);
        }
        if (!is_first) {
            //#unroll r 4: values[(i + $ru) * LANES + lane] = sum_$r;
        }
        workgroupBarrier();
        //#unroll r 4: sum_$r += values[(i + $ru) * LANES + lane];
        workgroupBarrier();
//#endif
        if (is_first) {
            //#unroll r 4: values[(i + $ru) * LANES + lane] = weights[i + $ru].w * load_v(row_$r * params.value_stride + value_at) + weights[i + $ru].y * sum_$r;
        }
        workgroupBarrier();
        if (is_first) {
            //#unroll r 4: sum_$r = vec4<f32>(0.0);
            for (var m = 0u; m <= four; m += 1u) {
                let rows = of_values(m, lane);
                //#unroll r 4: sum_$r += rows * pairs[pairs_$r + m];
            }
        }
        workgroupBarrier();
        if (is_first) {
            //#unroll r 4: values[(i + $ru) * LANES + lane] = select(vec4<f32>(0.0), sum_$r, i + $ru < count);
//#if made
            //#unroll r 4: if (inside && i + $ru < count) { made[2u * (row_$r * params.heads + group.y) * params.value_units + column] = sum_$r; }
//#endif
        }
        workgroupBarrier();
//#if o
        if (!is_first) {
            for (var m = 0u; m <= four; m += 1u) {
                let rows = of_values(m, lane);
                //#unroll r 4: sum_$r += rows * pairs[pairs_$r + FOURS + m];
            }
            //#unroll r 4: if (inside && i + $ru < count) { store_o(row_$r * params.value_stride + value_at, sum_$r); }
        }
//#endif
        let keep = kept_of_state(row0, group.y, count);
        for (var block = index; block < params.key_units * LANES; block += THREADS) {
            let unit = block / LANES;
            let own = block % LANES;
            let at = 4u * unit * LANES + own;
            //#unroll c 4: var sum_$c = keep * state[at + $cu * LANES];
            // Past the last token weights are zero.
            for (var t = 0u; t < count; t += 4u) {
                //#unroll n 4: let key_$n = weights[t + $nu].z * load_k((row0 + min(t + $nu, count - 1u)) * params.key_stride + key_at + unit);
                //#unroll n 4: let value_$n = values[(t + $nu) * LANES + own];
                //#unroll n 4, c 4: sum_$c += key_$n[$c] * value_$n;
            }
            //#unroll c 4: state[at + $cu * LANES] = sum_$c;
        }
        workgroupBarrier();
    }
//#if last
    for (var at = index; at < size * LANES; at += THREADS) {
        let unit = group.x * LANES + at % LANES;
        if (unit < params.value_units) {
            store_last(((places[0] * (params.value_stride / params.value_units) + head) * size + at / LANES) * params.value_units + unit, state[at]);
        }
    }
//#endif
}
