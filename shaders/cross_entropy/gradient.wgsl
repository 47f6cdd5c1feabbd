// dlogits[i, c] = softmax(logits[i, :])[c] - onehot(target)[c]  of a block's tokens, with SOFTCAP (the
// logits are capped already) times the slope 1 - (logits / softcap)²,
// for the first batch_info[0] - first rows; target = targets[rows[first + i]]. With OBJECTIVE the
// target has the share 1 - smoothing and all tokens share the rest.
//
// logits (count, ·) float32, of which the block begins at unit unit0; dlogits (count, columns),
// overwritten with zeros in its padding. softmax (label rows, 2): cross_entropy/losses.wgsl.
// On software adapters a subgroup has a row (BY_ROW), so that what is the row's is read once.
// Launcher: ops/loss.py.
//#include common/columns.wgsl
//#if !BY_ROW
//#include common/flat.wgsl
//#endif

struct Params {
    count: u32, //= logits.rows
    first: u32,
    columns: u32, //= dlogits.columns
    stride: u32, //= logits.stride
    unit0: u32,
    token0: u32,
    units: u32, //= dlogits.stride
    vocab: u32,
    softcap: f32,
    smoothing: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 logits: 4 float32
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> targets: array<i32>;
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
@group(0) @binding(5) var<storage, read> softmax: array<f32>;
//#output 6 dlogits: 8

//#if BY_ROW
@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let row = group.x;
    let label = params.first + row;
    if (label >= batch_info[0]) {
        return;
    }
    let at = u32(targets[rows[label]]) - params.token0;
    let top = softmax[2u * label];
    let sum = softmax[2u * label + 1u];
    let base = row * params.stride + params.unit0;
    for (var i = local.x; i < params.units; i += THREADS) {
        store_dlogits(row * params.units + i, eight(dlogit(base, 2u * i, at, top, sum), dlogit(base, 2u * i + 1u, at, top, sum)));
    }
}
//#else
fn each(i: u32) {
    let row = i / params.units;
    let label = params.first + row;
    if (row >= params.count || label >= batch_info[0]) {
        return;
    }
    let unit = 2u * (i % params.units);
    let at = u32(targets[rows[label]]) - params.token0;
    let top = softmax[2u * label];
    let sum = softmax[2u * label + 1u];
    let base = row * params.stride + params.unit0;
    store_dlogits(i, eight(dlogit(base, unit, at, top, sum), dlogit(base, unit + 1u, at, top, sum)));
}
//#endif

fn dlogit(base: u32, unit: u32, at: u32, top: f32, sum: f32) -> vec4<f32> {
    let p = live4(unit, exp(load_logits(base + unit) - top) / sum);
    let hit = vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) == vec4<u32>(at);
//#if OBJECTIVE
    let share = params.smoothing / f32(params.vocab);
    let d = p - select(vec4<f32>(0.0), vec4<f32>(1.0 - params.smoothing), hit) - live4(unit, vec4<f32>(share));
//#else
    let d = p - select(vec4<f32>(0.0), vec4<f32>(1.0), hit);
//#endif
//#if SOFTCAP
    let t = load_logits(base + unit) / params.softcap;
    return d * (1.0 - t * t);
//#else
    return d;
//#endif
}
