// What passes over a sequence's chunks share. A workgroup has a head's state in its memory, or LANES
// units of its columns; two invocations have the same four tokens of a chunk by a unit of columns: rows
// 4 · four …, column `lane` of the workgroup's. They share the work: THREADS = 2 · FOURS · LANES.
//
// weights of a token: (into · q's scale, -beta · into · k's scale, out of · k's scale, beta).

var<workgroup> state: array<vec4<f32>, STATE>;
var<workgroup> values: array<vec4<f32>, CHUNK * LANES>;
var<workgroup> weights: array<vec4<f32>, CHUNK>;

fn read_weights(index: u32, row0: u32, head: u32, count: u32) {
    for (var t = index; t < CHUNK; t += THREADS) {
        let at = 2u * ((row0 + min(t, count - 1u)) * params.heads + head);
        let token = tokens[at];
        let ends = tokens[at + 1u];
        let all = vec4<f32>(ends.x * token.x, -token.z * ends.x * token.y, ends.y * token.y, token.z);
        weights[t] = select(vec4<f32>(0.0), all, t < count);
    }
}

// What is kept of the state over a chunk.
fn kept_of_state(row0: u32, head: u32, count: u32) -> f32 {
    return tokens[2u * ((row0 + count - 1u) * params.heads + head) + 1u].x;
}

// Columns of four rows of the state, for products with a unit of q or k.
fn of_state(unit: u32, lane: u32) -> mat4x4<f32> {
    let at = 4u * unit * LANES + lane;
    return mat4x4<f32>(state[at], state[at + LANES], state[at + 2u * LANES], state[at + 3u * LANES]);
}

fn of_values(four: u32, lane: u32) -> mat4x4<f32> {
    let at = 4u * four * LANES + lane;
    return mat4x4<f32>(values[at], values[at + LANES], values[at + 2u * LANES], values[at + 3u * LANES]);
}
