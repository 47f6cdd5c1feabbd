// rope/rotate.wgsl where it is half-split and heads and their rotated halves are units of eight
// elements, HEAD and HALF of them. Each invocation writes one unit of each half, or one beyond them;
// those of x1's heads come after those of x's. Software adapters read the table from a texture
// (TABLE_TEXTURE). Launcher: kernels/rope.py.
//#include common/flat.wgsl
//#include common/rope_units.wgsl

struct Params {
    rows: u32, //= x.rows
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

fn each(i: u32) {
    let count = params.rows * HEADS * UNITS;
    if (i < count) {
        let p = place(i, HEADS);
        if (p.t < HALF) {
            let r = rotated(positions[p.row], p.t, params.sign, load_x(p.first), load_x(p.first + HALF));
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
            let r = rotated(positions[p.row], p.t, params.sign, load_x1(p.first), load_x1(p.first + HALF));
            store_y1(p.first, r.first);
            store_y1(p.first + HALF, r.second);
        } else {
            store_y1(p.first + HALF, load_x1(p.first + HALF));
        }
    }
//#endif
}
