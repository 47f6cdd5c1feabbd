// ddt_t = Σ direct + A · da_t, where the log decay's gradient is
// da_t = Σ near + Σ_{i ≥ t} far_c_i + Σ_{j < t} dt_j · far_b_j + kept · Σ sums, over the tokens i, j of t's chunk.
//
// near, direct, far_c, far_b and sums as the kernels before have them, of as many parts; ddt (rows, heads of
// all) float32 is overwritten, its padding with zeros by the last head. An invocation has a chunk of a head.
// Launcher: kernels/mamba_chunks.py.
//#include common/mamba_chunks.wgsl

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 tokens: 8 float32
@group(0) @binding(2) var<storage, read> near: array<f32>;
@group(0) @binding(3) var<storage, read> direct: array<f32>;
@group(0) @binding(4) var<storage, read> far_c: array<f32>;
@group(0) @binding(5) var<storage, read> far_b: array<f32>;
@group(0) @binding(6) var<storage, read> sums: array<f32>;
@group(0) @binding(7) var<storage, read> a_log: array<f32>;
@group(0) @binding(8) var<storage, read_write> ddt: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let own = group.x * THREADS + local.x;
    if (own >= params.heads) {
        return;
    }
    let head = params.first_head + own;
    let first = group.y * CHUNK;
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let blocks = (count + SETS * THREADS - 1u) / (SETS * THREADS);
    var product = 0.0;
    for (var part = 0u; part < SUMS; part += 1u) {
        product += sums[((group.z * params.heads + own) * params.chunks + group.y) * SUMS + part];
    }
    product *= high(load_tokens(row0 * params.heads + own)).y;
    var da: array<f32, CHUNK>;
    var after = 0.0;
    for (var left = count; left > 0u; left -= 1u) {
        let t = left - 1u;
        let at = (row0 + t) * params.heads + own;
        var sum = product;
        for (var part = t / (SETS * THREADS); part < blocks; part += 1u) {
            sum += near[at * (CHUNK / (SETS * THREADS)) + part];
        }
        for (var part = 0u; part < FAR; part += 1u) {
            after += far_c[at * FAR + part];
        }
        da[t] = sum + after;
    }
    let rate = -exp(a_log[head]);
    var before = 0.0;
    for (var t = 0u; t < count; t += 1u) {
        let row = row0 + t;
        let at = row * params.heads + own;
        let token = load_tokens(at);
        // Where a sample begins, the decay does not depend on dt.
        var sum = rate * select(0.0, da[t] + before, low(token).x > GONE);
        for (var part = 0u; part < DIRECT; part += 1u) {
            sum += direct[at * DIRECT + part];
        }
        for (var part = 0u; part < FAR; part += 1u) {
            before += low(token).y * far_b[at * FAR + part];
        }
        let out = row * params.dt_stride + head;
        ddt[out] = high(token).x * sum;
        if (own + 1u == params.heads && head + 8u >= params.dt_stride) {
            for (var past = out + 1u; past < (row + 1u) * params.dt_stride; past += 1u) {
                ddt[past] = 0.0;
            }
        }
    }
}
