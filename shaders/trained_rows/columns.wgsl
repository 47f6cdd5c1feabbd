// columns[rows[first + m], k] = scale · dlogits[m, tokens[k] - row0]  for the trained tokens of a block
// of the vocabulary, and the first batch_info[0] - first rows.
//
// dlogits (count, row_count), rows (label rows): their places in the batch, tokens (trained), columns
// (rows of the batch, trained) float32: what is of other rows and tokens is left alone.
// Launcher: ops/trained_gradients.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= dlogits.rows
    first: u32,
    trained: u32,
    stride: u32, //= dlogits.stride
    columns_stride: u32,
    row0: u32,
    row_count: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dlogits: 1 table
@group(0) @binding(2) var<storage, read> tokens: array<u32>;
@group(0) @binding(3) var<storage, read> rows: array<u32>;
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
@group(0) @binding(5) var<storage, read_write> columns: array<f32>;

fn each(i: u32) {
    let m = i / params.trained;
    let label = params.first + m;
    if (m >= params.count || label >= batch_info[0]) {
        return;
    }
    let k = i % params.trained;
    let token = tokens[k];
    if (token >= params.row0 && token - params.row0 < params.row_count) {
        let at = rows[label] * params.columns_stride + k;
        columns[at] = params.scale * load_dlogits(m * params.stride + token - params.row0);
    }
}
