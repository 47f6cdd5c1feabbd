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
    let four = index / LANES;
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
        for (var d = 0u; d < params.key_units; d += 1u) {
            let columns = of_state(d, lane);
            //#unroll r 4: sum_$r += columns * load_k(at_$r + d);
        }
        //#unroll r 4: sum_$r *= weights[i + $ru].z;
        for (var t = i; t < count; t += 1u) {
            let pair = pairs[pair_at + t * stride + FOURS];
            let gradient = load_dout((row0 + t) * params.value_stride + own_at);
            //#unroll r 4: sum_$r += pair[$r] * gradient;
        }
        //#unroll r 4: values[(i + $ru) * LANES + lane] = sum_$r; sum_$r = vec4<f32>(0.0);
        workgroupBarrier();
        for (var t = i; t < count; t += 1u) {
            let pair = pairs[pair_at + t * stride];
            let value = values[t * LANES + lane];
            //#unroll r 4: sum_$r += pair[$r] * value;
        }
        workgroupBarrier();
        //#unroll r 4
            values[(i + $ru) * LANES + lane] = sum_$r;
            if (inside && i + $ru < count) {
                let row_$r = row0 + i + $ru;
                made[(2u * (row_$r * params.heads + group.y) + 1u) * params.value_units + column] = sum_$r;
                store_dv(row_$r * params.value_stride + own_at, weights[i + $ru].w * sum_$r);
            }
        //#end
        workgroupBarrier();
        let keep = kept_of_state(row0, group.y, count);
        for (var block = index; block < params.key_units * LANES; block += THREADS) {
            let unit = block / LANES;
            let own = block % LANES;
            let value_unit = value_at + min(group.x * LANES + own, params.value_units - 1u);
            let at = 4u * unit * LANES + own;
            //#unroll c 4: var next_$c = keep * state[at + $cu * LANES];
            for (var t = 0u; t < count; t += 1u) {
                let key_row = (row0 + t) * params.key_stride + key_at + unit;
                let query = weights[t].x * load_q(key_row);
                let key = weights[t].y * load_k(key_row);
                let gradient = load_dout((row0 + t) * params.value_stride + value_unit);
                let value = values[t * LANES + own];
                //#unroll c 4: next_$c += query[$c] * gradient + key[$c] * value;
            }
            //#unroll c 4: state[at + $cu * LANES] = next_$c;
        }
        workgroupBarrier();
    }
}
