// ddt_t = near[0] + far[1] + A · da_t, the sum over the parts of far, where the log decay's gradient is
// da_t = near[1] + Σ_{i ≥ t} far[0] + Σ_{j < t} dt_j · far[1] + kept · S·dS, over the tokens i, j of t's chunk.
//
// near, far as in mamba_scan/pair_gradients.wgsl and mamba_scan/group_gradients.wgsl; ddt (rows, heads of all)
// float32 is overwritten, its padding with zeros by the last head. A workgroup takes a chunk of a head.
// Launcher: kernels/mamba_scan.py.
//#include common/mamba_scan.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> states: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> near: array<vec2<f32>>;
@group(0) @binding(4) var<storage, read> far: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> a_log: array<f32>;
@group(0) @binding(6) var<storage, read_write> ddt: array<f32>;

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
    let rest = tokens[2u * at + 1u];
    var own = vec2<f32>(0.0);
    for (var part = 0u; part < PARTS; part += 1u) {
        own += far[at * PARTS + part];
    }
    before[index] = select(0.0, own.x, index < count);
    after[index] = select(0.0, token.y * own.y, index < count);
    let size = 4u * params.state_units * params.head_units;
    let state_at = 2u * ((group.z * params.heads + group.y) * params.chunks + group.x) * size;
    var product = 0.0;
    for (var n = index; n < size; n += CHUNK) {
        product += dot(states[state_at + n], states[state_at + size + n]);
    }
    sums[index] = product;
    workgroupBarrier();
    var sum = 0.0;
    for (var t = 0u; t < CHUNK; t += 1u) {
        sum += sums[t];
    }
    sum = rest.y * sum + near[at].y;
    for (var t = 0u; t < CHUNK; t += 1u) {
        sum += select(after[t], before[t], t >= index);
    }
    if (index < count) {
        let head = params.first_head + group.y;
        let out = row * params.dt_stride + head;
        // Where a sample begins, the decay does not depend on dt.
        let da = select(0.0, sum, token.x > GONE);
        ddt[out] = rest.x * (near[at].x + own.y - exp(a_log[head]) * da);
        if (group.y + 1u == params.heads && head + 8u >= params.dt_stride) {
            for (var past = out + 1u; past < (row + 1u) * params.dt_stride; past += 1u) {
                ddt[past] = 0.0;
            }
        }
    }
}
