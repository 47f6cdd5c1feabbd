// Columns of products for software adapters: eight an invocation, but in a last tile of at most half the
// width (NARROW) four, so that no invocation computes columns that there are not. Such a tile has a
// loop of its own; loops that are not its take no turns, since both sides of a branch are computed.

fn is_narrow(tile: u32) -> bool {
//#if NARROW
    return tile * THREADS * 8u + THREADS * 4u >= params.columns;
//#else
    return false;
//#endif
}

fn first_column(tile: u32, invocation: u32, narrow: bool) -> u32 {
    return tile * THREADS * 8u + invocation * select(8u, 4u, narrow);
}

//#if NARROW
// The four from column c0 on, a multiple of four, of the eight that lie together.
fn half_at(c0: u32, v: Eight) -> vec4<f32> {
    return select(low(v), high(v), c0 % 8u == 4u);
}

//#endif
// Of a narrow tile what belongs to the four columns from c0 on, as even.
fn own_columns(narrow: bool, c0: u32, v: Eight) -> Eight {
//#if NARROW
    return Eight(select(v.even, half_at(c0, v), narrow), v.odd);
//#else
    return v;
//#endif
}

// Stores what an invocation has of a row, with zeros up to the next multiple of eight columns.
fn store_tile(row: u32, rows: u32, c0: u32, narrow: bool, lo: vec4<f32>, hi: vec4<f32>) {
    let here = row < rows && c0 / 8u * 8u < params.columns;
//#if EIGHT
//#if NARROW
    // The neighbour has the other four.
    let second = select(hi, subgroupShuffleXor(lo, 1u), narrow);
    if (here && c0 % 8u == 0u) {
        store8(row, c0, lo, second);
    }
//#else
    if (here) {
        store8(row, c0, lo, hi);
    }
//#endif
//#else
    if (here) {
        store4(row, c0, lo);
//#if NARROW
        if (!narrow) {
            store4(row, c0 + 4u, hi);
        }
//#else
        store4(row, c0 + 4u, hi);
//#endif
    }
//#endif
}
