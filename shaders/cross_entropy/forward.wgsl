// losses[first + i] = log Σ_c exp(logits[i, c]) - logits[i, target],  and where dlogits is bound
// dlogits[i, :] = softmax(logits[i, :]) - onehot(target), with SOFTCAP (the logits are capped
// already) times the slope 1 - (logits / softcap)².
// With OBJECTIVE the target has the share 1 - smoothing and all tokens share the rest, and
// z_loss · (log Σ exp)² is added,
// for the first batch_info[0] - first rows; target = targets[rows[first + i]].
//
// logits (count, vocab) float32, dlogits (count, vocab), overwritten with zeros in its padding.
// THREADS invocations share a row. Launcher: ops/cross_entropy.py.
//#include common/columns.wgsl
//#include common/log.wgsl
//#include common/row_reduce.wgsl

struct Params {
    count: u32,
    first: u32,
    columns: u32,
    stride: u32,
    softcap: f32,
    smoothing: f32,
    z_loss: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> logits: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> targets: array<i32>;
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
@group(0) @binding(5) var<storage, read_write> losses: array<f32>;
//#output 6 dlogits?: 8

fn live(unit: u32) -> vec4<bool> {
    return vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(params.columns);
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let assigned = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(assigned, params.count - 1u);
    let exists = assigned < params.count && params.first + row < batch_info[0];
    let thread = local.x;
    let base = row * params.stride;
    var units = params.stride;
    if (params.first + group.x * ROWS >= batch_info[0]) {
        units = 0u;
    }
    let lowest = vec4<f32>(-3.0e38);
    var largest = lowest;
    for (var i = thread; i < units; i += THREADS) {
        largest = max(largest, select(lowest, logits[base + i], live(i)));
    }
    let top = reduce_max(max(max(largest.x, largest.y), max(largest.z, largest.w)), thread);
    var sums = vec4<f32>(0.0);
    for (var i = thread; i < units; i += THREADS) {
        sums += live4(i, exp(logits[base + i] - top));
    }
    let sum = reduce_sum(sums.x + sums.y + sums.z + sums.w, thread);
    let lse = top + accurate_log(sum);
//#if OBJECTIVE
    var all = vec4<f32>(0.0);
    for (var i = thread; i < units; i += THREADS) {
        all += live4(i, logits[base + i]);
    }
    let mean = reduce_sum(all.x + all.y + all.z + all.w, thread) / f32(params.columns);
    let slope = 1.0 + 2.0 * params.z_loss * lse;
    let share = params.smoothing / f32(params.columns);
    let hit_share = 1.0 - params.smoothing;
//#else
    let slope = 1.0;
    let share = 0.0;
    let hit_share = 1.0;
//#endif
    if (!exists) {
        return;
    }
    let target_id = u32(targets[rows[params.first + row]]);
    if (thread == 0u) {
        let hit = logits[base + target_id / 4u][target_id % 4u];
//#if OBJECTIVE
        losses[params.first + row] = lse - mix(hit, mean, params.smoothing) + params.z_loss * lse * lse;
//#else
        losses[params.first + row] = lse - hit;
//#endif
    }
//#if dlogits
    for (var i = 2u * thread; i < units; i += 2u * THREADS) {
        store_dlogits((base + i) / 2u, eight(
            dlogit(base, i, top, sum / slope, target_id, share, hit_share),
            dlogit(base, i + 1u, top, sum / slope, target_id, share, hit_share),
        ));
    }
//#endif
}

//#if dlogits
fn dlogit(base: u32, unit: u32, top: f32, sum: f32, target_id: u32, share: f32, hit_share: f32) -> vec4<f32> {
    let p = live4(unit, exp(logits[base + unit] - top) / sum);
    let hit = vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(target_id);
    let d = p - select(vec4<f32>(0.0), vec4<f32>(hit_share), hit) - live4(unit, vec4<f32>(share));
//#if SOFTCAP
    let t = logits[base + unit] / params.softcap;
    return d * (1.0 - t * t);
//#else
    return d;
//#endif
}
//#endif
