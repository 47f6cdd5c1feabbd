// partials[first + i, block] = (max_c, Σ_c exp(logits - max_c), Σ_c logits, the target's logit)  of
// row i over a block's tokens, block_rows of the vocabulary or those that are left, with 0 for a
// target that is none of them, and for the sum of logits without OBJECTIVE, in whose place ENTROPY
// has Σ_c exp(d)·d of the distances d = logits - max_c; the sum of exponentials is
// below zero where a token before the target has the block's largest logit, so that of several that
// are the largest one, the first, is found;
// for the first batch_info[0] - first rows; target = targets[rows[first + i]].
//
// logits (count, ·) float32 of the blocks from params.block on, one for each workgroup along y.
// THREADS invocations share a row. Launcher: ops/loss.py.
//#include common/row_reduce.wgsl

struct Params {
    count: u32, //= logits.rows
    first: u32,
    stride: u32, //= logits.stride
    block_rows: u32,
    block: u32,
    blocks: u32,
    vocab: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 logits: 4 float32
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> targets: array<i32>;
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
@group(0) @binding(5) var<storage, read_write> partials: array<vec4<f32>>;

fn live(unit: u32, columns: u32) -> vec4<bool> {
    return vec4<u32>(4u * unit) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(columns);
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let assigned = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end repeats the last row, unstored.
    let row = min(assigned, params.count - 1u);
    let exists = assigned < params.count && params.first + row < batch_info[0];
    let thread = local.x;
    let block = params.block + group.y;
    let token0 = block * params.block_rows;
    let columns = min(params.block_rows, params.vocab - token0);
    let base = row * params.stride + group.y * (params.block_rows / 4u);
    var units = (columns + 3u) / 4u;
    if (params.first + group.x * ROWS >= batch_info[0]) {
        units = 0u;
    }
    let lowest = vec4<f32>(-2.0e38);
    let none = vec4<f32>(0.0);
    var largest = lowest;
    for (var i = thread; i < units; i += THREADS) {
        largest = max(largest, select(lowest, load_logits(base + i), live(i, columns)));
    }
    let top = reduce_max(max(max(largest.x, largest.y), max(largest.z, largest.w)), thread);
    let target_token = u32(targets[rows[params.first + row]]);
    let before = clamp(target_token, token0, token0 + columns) - token0;
    var sums = vec4<f32>(0.0);
    var earlier = lowest;
//#if ENTROPY?
    var moments = none;
//#endif
    for (var i = thread; i < units; i += THREADS) {
        let unit = load_logits(base + i);
        sums += select(none, exp(unit - top), live(i, columns));
//#if ENTROPY?
        moments += select(none, exp(unit - top) * (unit - top), live(i, columns));
//#endif
        earlier = max(earlier, select(lowest, unit, live(i, before)));
    }
    let sum = reduce_sum(sums.x + sums.y + sums.z + sums.w, thread);
    let first_top = reduce_max(max(max(earlier.x, earlier.y), max(earlier.z, earlier.w)), thread);
//#if OBJECTIVE
    var all = vec4<f32>(0.0);
    for (var i = thread; i < units; i += THREADS) {
        all += select(none, load_logits(base + i), live(i, columns));
    }
    let total = reduce_sum(all.x + all.y + all.z + all.w, thread);
//#else
//#if ENTROPY?
    let total = reduce_sum(moments.x + moments.y + moments.z + moments.w, thread);
//#else
    let total = 0.0;
//#endif
//#endif
    if (!exists || thread > 0u) {
        return;
    }
    // A target before the block wraps round to far behind it.
    let at = target_token - token0;
    var hit = 0.0;
    if (at < columns) {
        hit = load_logits(base + at / 4u)[at % 4u];
    }
    let signed = select(sum, -sum, before > 0u && first_top == top);
    partials[(params.first + row) * params.blocks + block] = vec4<f32>(top, signed, total, hit);
}
