// Chunk before chunk with the gradient dS of the state that a chunk leaves:
//
// dv' = Pᵀ · do + out of · k̂ · dS,  x = Tᵀ · dv',  dv = beta · x,
// dS = kept · dS + (into · q̂)ᵀ · do - (beta · into · k̂)ᵀ · x
//
// Shapes as in gated_delta/states.wgsl: dout and dv like v; dv, states[1], which is dS of each chunk's
// end, and made[1], which is x, are overwritten. Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl
//#include common/gated_delta_state.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> pairs: array<vec4<f32>>;
//#input 3 q: 4
//#input 4 k: 4
//#input 5 dout: 4
//#output 6 dv: 4
@group(0) @binding(7) var<storage, read_write> made: array<vec4<f32>>;
@group(0) @binding(8) var<storage, read_write> states: array<vec4<f32>>;

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
    let value_at = head * params.value_units;
    let own_at = value_at + min(column, params.value_units - 1u);
    let size = 4u * params.key_units;
    let stride = params.heads * PAIRS * FOURS;
    for (var at = index; at < size * LANES; at += THREADS) {
        state[at] = vec4<f32>(0.0);
    }
    for (var past = 1u; past <= params.chunks; past += 1u) {
        let chunk = params.chunks - past;
        let first = chunk * CHUNK;
        let count = count_of(first);
        let row0 = group.z * params.seq + first;
        let pair_at = row0 * stride + group.y * PAIRS * FOURS + four;
        read_weights(index, row0, group.y, count);
        workgroupBarrier();
        let state_at = (2u * ((group.z * params.heads + group.y) * params.chunks + chunk) + 1u) * size;
        for (var at = index; at < size * LANES; at += THREADS) {
            let unit = group.x * LANES + at % LANES;
            if (unit < params.value_units) {
                states[(state_at + at / LANES) * params.value_units + unit] = state[at];
            }
        }
        //#unroll r 4: let at_$r = (row0 + min(i + $ru, count - 1u)) * params.key_stride + key_at; var sum_$r = vec4<f32>(0.0);
        if (is_first) {
            for (var d = 0u; d < params.key_units; d += 1u) {
                let columns = of_state(d, lane);
                //#unroll r 4: sum_$r += columns * load_k(at_$r + d);
            }
            //#unroll r 4: sum_$r *= weights[i + $ru].z;
        } else {
            for (var t = i; t < count; t += 4u) {
                //#unroll n 4: let near_$n = min(t + $nu, count - 1u); let pair_$n = pairs[pair_at + near_$n * stride + FOURS];
                //#unroll n 4: let gradient_$n = load_dout((row0 + near_$n) * params.value_stride + own_at);
                //#unroll n 4: let scale_$n = select(0.0, 1.0, t + $nu < count);
                //#unroll n 4, r 4: sum_$r += scale_$n * pair_$n[$r] * gradient_$n;
            }
            //#unroll r 4: values[(i + $ru) * LANES + lane] = sum_$r;
        }
        workgroupBarrier();
        if (is_first) {
            //#unroll r 4: values[(i + $ru) * LANES + lane] += sum_$r; sum_$r = vec4<f32>(0.0);
        }
        workgroupBarrier();
        if (is_first) {
            // Past the last token values are zero, as weights are.
            for (var t = i; t < count; t += 4u) {
                //#unroll n 4: let pair_$n = pairs[pair_at + min(t + $nu, count - 1u) * stride]; let value_$n = values[(t + $nu) * LANES + lane];
                //#unroll n 4, r 4: sum_$r += pair_$n[$r] * value_$n;
            }
        }
        workgroupBarrier();
        if (is_first) {
            //#unroll r 4
                values[(i + $ru) * LANES + lane] = sum_$r;
                if (inside && i + $ru < count) {
                    let row_$r = row0 + i + $ru;
                    made[(2u * (row_$r * params.heads + group.y) + 1u) * params.value_units + column] = sum_$r;
                    store_dv(row_$r * params.value_stride + own_at, weights[i + $ru].w * sum_$r);
                }
            //#end
        }
        workgroupBarrier();
        let keep = kept_of_state(row0, group.y, count);
        for (var block = index; block < params.key_units * LANES; block += THREADS) {
            let unit = block / LANES;
            let own = block % LANES;
            let value_unit = value_at + min(group.x * LANES + own, params.value_units - 1u);
            let at = 4u * unit * LANES + own;
            //#unroll c 4: var next_$c = keep * state[at + $cu * LANES];
            for (var t = 0u; t < count; t += 2u) {
                //#unroll n 2
                    let row_$n = row0 + min(t + $nu, count - 1u);
                    let key_row_$n = row_$n * params.key_stride + key_at + unit;
                    let query_$n = weights[t + $nu].x * load_q(key_row_$n);
                    let key_$n = weights[t + $nu].y * load_k(key_row_$n);
                    let gradient_$n = load_dout(row_$n * params.value_stride + value_unit);
                    let value_$n = values[(t + $nu) * LANES + own];
                //#end
                //#unroll n 2, c 4: next_$c += query_$n[$c] * gradient_$n + key_$n[$c] * value_$n;
            }
            //#unroll c 4: state[at + $cu * LANES] = next_$c;
        }
        workgroupBarrier();
    }
}
