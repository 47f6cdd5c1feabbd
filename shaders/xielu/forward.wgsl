// y = xIELU(x), element by element, by four scalars that are stored with the model.
// x, y of one layout; y overwritten, its padding with zeros. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/columns.wgsl
//#include common/xielu.wgsl

struct Params {
    units: u32, //= x.units
    stride: u32, //= x.stride
    columns: u32, //= x.columns
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#output 2 y: 8
//#input 3 alpha_p: 1 float32
//#input 4 alpha_n: 1 float32
//#input 5 beta: 1 float32
//#input 6 eps: 1 float32

fn each(i: u32) {
    if (i < params.units) {
        let x = load_x(i);
        let c = curve();
        store_y(i, live8(i % params.stride, Eight(xielu(x.even, c), xielu(x.odd, c))));
    }
}
