// rope/rotate.wgsl where it is half-split and heads and their rotated halves are units of eight
// elements, HEAD and HALF of them. Each invocation writes one unit of each half, or one beyond them;
// those of x1's heads come after those of x's. Software adapters read the table from a texture
// (TABLE_TEXTURE). Launcher: kernels/rope.py.
//#include common/flat.wgsl

struct Params {
    rows: u32,
    sign: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> positions: array<u32>;
//#if TABLE_TEXTURE
//#input 2 table: 8 texture float32
//#else
//#input 2 table: 8 float32
//#endif
//#input 3 x: 8
//#output 4 y: 8
//#input 5 x1?: 8
//#output 6 y1?: 8

const UNITS = HEAD - HALF;

fn each(i: u32) {
    let count = params.rows * HEADS * UNITS;
    if (i < count) {
        let p = place(i, HEADS);
        if (p.t < HALF) {
            let r = rotated(p, load_x(p.first), load_x(p.first + HALF));
            store_y(p.first, r.first);
            store_y(p.first + HALF, r.second);
        } else {
            store_y(p.first + HALF, load_x(p.first + HALF));
        }
        return;
    }
//#if x1
    if (i < count + params.rows * HEADS1 * UNITS) {
        let p = place(i - count, HEADS1);
        if (p.t < HALF) {
            let r = rotated(p, load_x1(p.first), load_x1(p.first + HALF));
            store_y1(p.first, r.first);
            store_y1(p.first + HALF, r.second);
        } else {
            store_y1(p.first + HALF, load_x1(p.first + HALF));
        }
    }
//#endif
}

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

fn rotated(p: Place, x1: Eight, x2: Eight) -> Halves {
    // Four (cos, sin) in a unit of the table: the even elements and the odd ones.
    let at = (positions[p.row] * HALF + p.t) * 2u;
    let a = load_table(at);
    let b = load_table(at + 1u);
    let cos = eight(a.even, b.even);
    let sin = scale8(eight(a.odd, b.odd), params.sign);
    return Halves(
        add_scaled8(multiply8(x1, cos), -1.0, multiply8(x2, sin)),
        add8(multiply8(x2, cos), multiply8(x1, sin)),
    );
}
