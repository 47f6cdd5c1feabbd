// tokens, as common/mamba_scan.wgsl has them, on software adapters; overwritten.
//
// dt (rows, heads of all), a_log and d, which is D (heads of all), float32; A = -exp(a_log). An invocation has a
// chunk of a head. Launcher: kernels/mamba_chunks.py.
//#include common/mamba_scan.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> segments: array<u32>;
@group(0) @binding(2) var<storage, read> dt: array<f32>;
@group(0) @binding(3) var<storage, read> a_log: array<f32>;
@group(0) @binding(4) var<storage, read> d: array<f32>;
//#output 5 tokens: 8 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let own = group.x * THREADS + local.x;
    let head = params.first_head + min(own, params.heads - 1u);
    let first = group.y * CHUNK;
    let row0 = group.z * params.seq + first;
    let count = count_of(first);
    let rate = -exp(a_log[head]);
    var logs: array<f32, CHUNK>;
    var sums: array<f32, CHUNK>;
    var sum = 0.0;
    for (var t = 0u; t < count; t += 1u) {
        let row = row0 + t;
        let segment = segments[row];
        let begins = first + t == 0u || segments[max(row, 1u) - 1u] != segment;
        let decay = select(rate * dt[row * params.dt_stride + head], GONE, begins);
        logs[t] = select(0.0, decay, segment != 0u);
        sum += logs[t];
        sums[t] = sum;
    }
    if (own >= params.heads) {
        return;
    }
    var after = 0.0;
    for (var left = count; left > 0u; left -= 1u) {
        let t = left - 1u;
        let row = row0 + t;
        let counts = select(0.0, 1.0, segments[row] != 0u);
        let size = counts * dt[row * params.dt_stride + head];
        let weights = vec4<f32>(logs[t], size, counts * kept(sums[t]), kept(after));
        store_tokens(row * params.heads + own, eight(weights, vec4<f32>(counts, kept(sum), counts * d[head], 0.0)));
        after += logs[t];
    }
}
