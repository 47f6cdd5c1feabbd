// Rotation of heads that are units of eight elements, HEAD of them, of which the first 2 · HALF are
// rotated in halves. Who includes it has `table`, float32 (positions, HALF · 8) of (cos, sin).
const UNITS = HEAD - HALF;

// A row, a unit of one of its heads, and where that is.
struct Place {
    row: u32,
    t: u32,
    first: u32,
}

fn place(i: u32, heads: u32) -> Place {
    let head = i / UNITS;
    let t = i % UNITS;
    return Place(head / heads, t, head * HEAD + t);
}

struct Halves {
    first: Eight,
    second: Eight,
}

// The t-th units of both halves of a head, by a row of the table.
fn rotated(position: u32, t: u32, sign: f32, x1: Eight, x2: Eight) -> Halves {
    // Four (cos, sin) in a unit of the table: the even elements and the odd ones.
    let at = (position * HALF + t) * 2u;
    let a = load_table(at);
    let b = load_table(at + 1u);
    let cos = eight(a.even, b.even);
    let sin = scale8(eight(a.odd, b.odd), sign);
    return Halves(
        add_scaled8(multiply8(x1, cos), -1.0, multiply8(x2, sin)),
        add8(multiply8(x2, cos), multiply8(x1, sin)),
    );
}
