// The block of a unit of a row.
fn block_at(row: u32, unit: u32) -> u32 {
//#if TILES
    return row / TILE_ROWS * ((8u * params.units - 1u) / BLOCKSIZE + 1u) + 8u * unit / BLOCKSIZE;
//#else
    return (row * params.units + unit) / (BLOCKSIZE / 8u);
//#endif
}
