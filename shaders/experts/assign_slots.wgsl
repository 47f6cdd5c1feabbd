// Gives each assignment i (of a row to one of its experts) a slot, a row of its expert's, in order:
//   slots[i] = that row, assignments[row] = i, or NONE for rows that nobody has,
//   tile_experts[row / EXPERT_TILE] = the expert, or NONE.
//
// A workgroup per expert; counts and rows as count.wgsl and begin.wgsl made them.
// Launcher: ops/routing.py.

const NONE = 0xffffffffu;

struct Params {
    count: u32,
    share: u32,
    experts: u32,
    rows_end: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> counts: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<u32>;
@group(0) @binding(4) var<storage, read_write> slots: array<u32>;
@group(0) @binding(5) var<storage, read_write> assignments: array<u32>;
@group(0) @binding(6) var<storage, read_write> tile_experts: array<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let expert = group.x;
    let thread = local.x;
    var row = rows[2u * expert];
    for (var before = 0u; before < thread; before += 1u) {
        row += counts[expert * THREADS + before];
    }
    let first = thread * params.share;
    for (var i = first; i < min(first + params.share, params.count); i += 1u) {
        if (ids[i] == expert) {
            slots[i] = row;
            assignments[row] = i;
            row += 1u;
        }
    }
    let end = rows[2u * expert + 1u];
    let tiles_end = (end + EXPERT_TILE - 1u) / EXPERT_TILE;
    for (var tile = rows[2u * expert] / EXPERT_TILE + thread; tile < tiles_end; tile += THREADS) {
        tile_experts[tile] = expert;
    }
    // The last expert has what is left over, too.
    let is_last = expert + 1u == params.experts;
    let own_end = select(tiles_end * EXPERT_TILE, params.rows_end, is_last);
    for (var unused = end + thread; unused < own_end; unused += THREADS) {
        assignments[unused] = NONE;
    }
    for (var tile = tiles_end + thread; tile < own_end / EXPERT_TILE; tile += THREADS) {
        tile_experts[tile] = NONE;
    }
}
