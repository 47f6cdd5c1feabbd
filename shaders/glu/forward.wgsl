// y = act(gate) · up, element by element. gate, up, y of one layout; y overwritten, zero padding
// stays zero. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/activation.wgsl

struct Params {
    units: u32, //= gate.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 gate: 8
//#input 2 up: 8
//#output 3 y: 8

fn each(i: u32) {
    if (i < params.units) {
        store_y(i, multiply8(activate8(load_gate(i)), load_up(i)));
    }
}
