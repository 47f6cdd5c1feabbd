// ddecay_t = partial[3] + Σ_{i ≥ t} into · (partial[0] - beta · partial[1]) + Σ_{j < t} out of · partial[2]
//            + kept · dS·S,  over the tokens i, j of t's chunk, and dbeta_t = partial[4] - into · partial[1].
//
// ddecay, dbeta (rows, value heads) float32 are overwritten, their padding with zeros by the last head;
// the rest as in gated_delta/key_gradient.wgsl. A workgroup takes a chunk of a head.
// Launcher: kernels/gated_delta.py.
//#include common/gated_delta.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> partial: array<f32>;
@group(0) @binding(4) var<storage, read_write> ddecay: array<f32>;
@group(0) @binding(5) var<storage, read_write> dbeta: array<f32>;

var<workgroup> before: array<f32, CHUNK>;
var<workgroup> after: array<f32, CHUNK>;
var<workgroup> sums: array<f32, CHUNK>;

@compute @workgroup_size(CHUNK)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * CHUNK;
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let row = row0 + min(index, count - 1u);
    let at = row * params.heads + group.y;
    let token = tokens[2u * at];
    let ends = tokens[2u * at + 1u];
    let told = partial[8u * at + 1u];
    before[index] = select(0.0, ends.x * (partial[8u * at] - token.z * told), index < count);
    after[index] = select(0.0, ends.y * partial[8u * at + 2u], index < count);
    let size = 4u * params.key_units * params.value_units;
    let state_at = 2u * ((group.z * params.heads + group.y) * params.chunks + group.x) * size;
    var product = 0.0;
    for (var d = index; d < size; d += CHUNK) {
        product += dot(states[state_at + d], states[state_at + size + d]);
    }
    sums[index] = product;
    workgroupBarrier();
    var sum = 0.0;
    for (var t = 0u; t < CHUNK; t += 1u) {
        sum += sums[t];
    }
    let end = tokens[2u * ((row0 + count - 1u) * params.heads + group.y) + 1u].x;
    sum = end * sum + partial[8u * at + 3u];
    for (var t = 0u; t < CHUNK; t += 1u) {
        sum += select(after[t], before[t], t >= index);
    }
    if (index < count) {
        let head = params.first_head + group.y;
        let out = row * params.gate_stride + head;
        let counts = ends.z > 0.0;
        ddecay[out] = select(0.0, sum, counts);
        dbeta[out] = select(0.0, partial[8u * at + 4u] - ends.x * told, counts);
        if (group.y + 1u == params.heads && head + 8u >= params.gate_stride) {
            for (var rest = out + 1u; rest < (row + 1u) * params.gate_stride; rest += 1u) {
                ddecay[rest] = 0.0;
                dbeta[rest] = 0.0;
            }
        }
    }
}
