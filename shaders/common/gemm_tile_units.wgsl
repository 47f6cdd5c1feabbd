// A unit of a tile whose first units along k are `first`. Where tiles are whole, all of a tile's
// units are of one of several layers.
fn raw_tile_unit(m: u32, first: u32, unit: u32) -> Raw_x {
//#if WHOLE_K
    return raw_row_from(min(m, params.rows - 1u), first, unit);
//#else
    return raw_unit(m, k_unit(first + unit));
//#endif
}
