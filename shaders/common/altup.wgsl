// Streams of AltUp: the active one is a matrix, the others are one below the other in a second one,
// in order, each of `params.units` units.

// The first unit of stream j, which is not the active one, among the others.
fn first_unit(j: u32) -> u32 {
    return select(j, j - 1u, j > ACTIVE) * params.units;
}
