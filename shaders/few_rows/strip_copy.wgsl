// y = x in strips (kernels/gemm/packed.py), in words of 16 bytes: `words` of them make a unit, which a
// subgroup of LANES reads of four columns each. x has `units` of each of its rows, which become the
// columns from `column0` on; other columns of y are left alone. Launcher: kernels/gemm/packed.py.
//#include common/flat.wgsl

struct Params {
    rows: u32,
    units: u32,
    words: u32,
    column0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: words
//#output 2 y: words

fn each(i: u32) {
    let row_words = params.units * params.words;
    if (i >= params.rows * row_words) {
        return;
    }
    let column = params.column0 + i / row_words;
    let unit = i % row_words / params.words;
    let strip = column / (4u * LANES);
    let lane = column % (4u * LANES) / 4u;
    let at = ((strip * params.units + unit) * 4u + column % 4u) * LANES + lane;
    store_y(at * params.words + i % params.words, load_x(i));
}
