// weight[row0 + k, :] = rows[k, :]  for all rows.
//
// first is the unit of eight that row0 begins with; of weight, of any type, the other rows are left alone.
// Launcher: ops/trained.py.
//#include common/flat.wgsl

struct Params {
    units: u32, //= rows.units
    first: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 rows: 8
//#output 2 weight: 8 table

fn each(i: u32) {
    if (i < params.units) {
        store_weight(params.first + i, load_rows(i));
    }
}
