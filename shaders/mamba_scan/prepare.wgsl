// tokens and pairs, as common/mamba_scan.wgsl has them: what depends only on tokens of the same chunk. Both
// are overwritten.
//
// dt (rows, heads of all), a_log and d, which is D (heads of all), float32; A = -exp(a_log). A workgroup takes a chunk of a head, an invocation four tokens by four. Launcher: kernels/mamba_scan.py.
//#include common/mamba_scan.wgsl
//#include common/gated_delta_decay.wgsl

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> segments: array<u32>;
//#input 2 bc: 4
@group(0) @binding(3) var<storage, read> d: array<f32>;
@group(0) @binding(4) var<storage, read> dt: array<f32>;
@group(0) @binding(5) var<storage, read> a_log: array<f32>;
@group(0) @binding(6) var<storage, read_write> tokens: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read_write> pairs: array<vec4<f32>>;

var<workgroup> counts: array<f32, CHUNK>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * CHUNK;
    let row0 = group.z * params.seq;
    let head = params.first_head + group.y;
    let state_at = head / params.group * params.state_units;
    let count = count_of(first);
    for (var t = index; t < CHUNK; t += THREADS) {
        let token = first + t;
        let row = row0 + min(token, params.seq - 1u);
        let segment = segments[row];
        let is_real = token < params.seq && segment != 0u;
        let begins = token == 0u || segments[max(row, 1u) - 1u] != segment;
        let decay = -exp(a_log[head]) * dt[row * params.dt_stride + head];
        counts[t] = select(0.0, 1.0, is_real);
        logs[t] = select(0.0, select(decay, GONE, begins), is_real);
    }
    workgroupBarrier();
    for (var t = index; t < count; t += THREADS) {
        var before = 0.0;
        var after = 0.0;
        for (var other = 0u; other < CHUNK; other += 1u) {
            before += select(0.0, logs[other], other <= t);
            after += select(0.0, logs[other], other > t);
        }
        let row = row0 + first + t;
        let at = 2u * (row * params.heads + group.y);
        let size = counts[t] * dt[row * params.dt_stride + head];
        tokens[at] = vec4<f32>(logs[t], size, counts[t] * kept(before), kept(after));
        tokens[at + 1u] = vec4<f32>(counts[t], kept(before + after), counts[t] * d[head], 0.0);
    }
    let i = 4u * (index / FOURS);
    let j = 4u * (index % FOURS);
    //#unroll r 4: var sum_$r = vec4<f32>(0.0);
    if (j <= i) {
        //#unroll r 4: let at_$r = (row0 + first + min(i + $ru, count - 1u)) * params.state_stride + state_at;
        //#unroll r 4: let other_$r = (row0 + first + min(j + $ru, count - 1u)) * params.state_stride + state_at;
        for (var d = 0u; d < params.state_units; d += 1u) {
            let others = mat4x4<f32>(load_bc(other_0 + d), load_bc(other_1 + d), load_bc(other_2 + d), load_bc(other_3 + d));
            //#unroll r 4: sum_$r += load_bc(params.c_at + at_$r + d) * others;
        }
        let gamma = decays(i, j);
        //#unroll r 4: sum_$r *= counts[i + $ru] * gamma[$r];
    }
    //#unroll r 4: if (i + $ru < count) { pairs[((row0 + first + i + $ru) * params.heads + group.y) * FOURS + j / 4u] = sum_$r; }
}
