// rows[2e], rows[2e + 1] = the first row of expert e, a multiple of EXPERT_TILE after the rows of
// those before it, and the row past its last.
//
// counts: how many rows each has, in THREADS parts. Launcher: ops/routing.py.
//#include common/flat.wgsl

struct Params {
    experts: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> counts: array<u32>;
@group(0) @binding(2) var<storage, read_write> rows: array<u32>;

fn total(expert: u32) -> u32 {
    var sum = 0u;
    for (var thread = 0u; thread < THREADS; thread += 1u) {
        sum += counts[expert * THREADS + thread];
    }
    return sum;
}

fn each(expert: u32) {
    if (expert >= params.experts) {
        return;
    }
    var first = 0u;
    for (var before = 0u; before < expert; before += 1u) {
        first += (total(before) + EXPERT_TILE - 1u) / EXPERT_TILE * EXPERT_TILE;
    }
    rows[2u * expert] = first;
    rows[2u * expert + 1u] = first + total(expert);
}
