// rope/rotate.wgsl where it is half-split and heads and their rotated halves are units of eight
// elements, HEAD and HALF of them; stride counts them too. Each invocation writes one unit of each
// half, or one beyond them. Software adapters read the table from a texture (TABLE_TEXTURE).
// Launcher: kernels/rope.py.
//#include common/flat.wgsl

struct Params {
    rows: u32,
    stride: u32,
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

fn each(i: u32) {
    let units = HEAD - HALF;
    let row = i / (HEADS * units);
    if (row >= params.rows) {
        return;
    }
    let t = i % units;
    let first = row * params.stride + i / units % HEADS * HEAD + t;
    let second = first + HALF;
    if (t < HALF) {
        // Four (cos, sin) in a unit of the table: the even elements and the odd ones.
        let at = (positions[row] * HALF + t) * 2u;
        let a = load_table(at);
        let b = load_table(at + 1u);
        let cos = eight(a.even, b.even);
        let sin = scale8(eight(a.odd, b.odd), params.sign);
        let x1 = load_x(first);
        let x2 = load_x(second);
        store_y(first, add_scaled8(multiply8(x1, cos), -1.0, multiply8(x2, sin)));
        store_y(second, add8(multiply8(x2, cos), multiply8(x1, sin)));
    } else {
        store_y(second, load_x(second));
    }
}
