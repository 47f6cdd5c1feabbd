// weight[tokens[k] - row0, :] = rows[k, :]  for the tokens whose rows are in this piece of the matrix.
//
// tokens (count), rows (count, ·), weight (piece_rows, ·) of any type; its other rows are left alone.
// Launcher: ops/trained.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= rows.rows
    stride: u32, //= rows.stride
    row0: u32,
    piece_rows: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<u32>;
//#input 2 rows: 8
//#output 3 weight: 8 table

fn each(i: u32) {
    let k = i / params.stride;
    if (k >= params.count) {
        return;
    }
    let token = tokens[k];
    if (token >= params.row0 && token - params.row0 < params.piece_rows) {
        store_weight((token - params.row0) * params.stride + i % params.stride, load_rows(i));
    }
}
