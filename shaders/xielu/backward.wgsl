// dx = dy · xIELU'(x), element by element, the scalars frozen. dy, x, dx of one layout; dx overwritten.
// Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/xielu.wgsl

struct Params {
    units: u32, //= x.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 x: 8
//#input 3 alpha_p: 1 float32
//#input 4 alpha_n: 1 float32
//#input 5 beta: 1 float32
//#input 6 eps: 1 float32
//#output 7 dx: 8

fn each(i: u32) {
    if (i < params.units) {
        let x = load_x(i);
        let c = curve();
        let slope = Eight(xielu_gradient(x.even, c), xielu_gradient(x.odd, c));
        store_dx(i, multiply8(load_dy(i), slope));
    }
}
