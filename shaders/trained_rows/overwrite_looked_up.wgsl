// table[m, :] = rows[slots[ids[m]], :]  for the tokens m of a batch whose row is trained.
//
// ids (count), slots (vocabulary): where a token's row is among the trained ones, or 0xffffffff;
// rows (trained rows, ·), table (count, ·) of any type; its other rows are left alone.
// Launcher: ops/trained.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= table.rows
    stride: u32, //= rows.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> slots: array<u32>;
//#input 3 rows: 8 table
//#output 4 table: 8

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.count) {
        return;
    }
    let slot = slots[ids[m]];
    if (slot != 0xffffffffu) {
        store_table(i, load_rows(slot * params.stride + i % params.stride));
    }
}
