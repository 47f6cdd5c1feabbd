// A unit of a tile whose first units along k are `first`. Where tiles are whole, all of a tile's
// units are of one of several layers.
fn raw_tile_unit(m: u32, first: u32, unit: u32) -> Raw_x {
//#if WHOLE_K
    return raw_row_from(min(m, params.rows - 1u), first, unit);
//#else
    return raw_unit(m, k_unit(first + unit));
//#endif
}
//#if RUNS

// Where such a unit lies, of tiles that are whole and x of one layer, and the last one of all.
fn x_place(m: u32, unit: u32) -> u32 {
    return min(m, params.rows - 1u) * x_stride() + params.x_unit0 + unit;
}

fn x_stride() -> u32 {
    return params.x_stride;
}
//#endif
