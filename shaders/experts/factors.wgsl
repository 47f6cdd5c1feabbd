// y[row, j] = w[row, j] · factors[e], e the expert of the row's j-th assignment.
//
// w, y (rows, top_k) float32, y overwritten, padded with zeros; the expert is that of the tile which
// the assignment's slot lies in. Launcher: ops/experts.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= y.rows
    top_k: u32,
    stride: u32, //= y.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 w: 1
@group(0) @binding(2) var<storage, read> slots: array<u32>;
@group(0) @binding(3) var<storage, read> tile_experts: array<u32>;
//#input 4 factors: 1 float32
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

fn each(i: u32) {
    let row = i / params.stride;
    if (row >= params.rows) {
        return;
    }
    let j = i % params.stride;
    if (j >= params.top_k) {
        y[i] = 0.0;
        return;
    }
    let e = tile_experts[slots[row * params.top_k + j] / EXPERT_TILE];
    y[i] = load_w(i) * load_factors(e);
}
