// What passes over a sequence's chunks share. A workgroup has LANES units of the columns of a head's state
// in its memory; an invocation has four tokens of a chunk, rows 4 · four …, by one unit of columns.
//
// weights of a token: (dt, into, out of, D).

var<workgroup> state: array<vec4<f32>, STATE>;
var<workgroup> values: array<vec4<f32>, CHUNK * LANES>;
var<workgroup> weights: array<vec4<f32>, CHUNK>;

fn read_weights(index: u32, row0: u32, head: u32, count: u32) {
    for (var t = index; t < CHUNK; t += THREADS) {
        let at = 2u * ((row0 + min(t, count - 1u)) * params.heads + head);
        let all = vec4<f32>(tokens[at].yzw, tokens[at + 1u].z);
        weights[t] = select(vec4<f32>(0.0), all, t < count);
    }
}

// What is kept of the state over a chunk.
fn kept_of_state(row0: u32, head: u32) -> f32 {
    return tokens[2u * (row0 * params.heads + head) + 1u].y;
}

// Columns of four rows of the state, for products with a unit of B or C.
fn of_state(unit: u32, lane: u32) -> mat4x4<f32> {
    let at = 4u * unit * LANES + lane;
    return mat4x4<f32>(state[at], state[at + LANES], state[at + 2u * LANES], state[at + 3u * LANES]);
}
