// dup = dy · act(gate),  dgate = dy · up · act'(gate), element by element.
//
// dy, gate, up, dgate, dup of one layout; both outputs overwritten. Launcher: ops/pointwise.py.
//#include common/flat.wgsl
//#include common/activation.wgsl

struct Params {
    units: u32, //= gate.units
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 8
//#input 2 gate: 8
//#input 3 up: 8
//#output 4 dgate: 8
//#output 5 dup: 8

fn each(i: u32) {
    if (i < params.units) {
        let g = load_gate(i);
        let dy = load_dy(i);
        store_dup(i, multiply8(dy, activate8(g)));
        store_dgate(i, multiply8(multiply8(dy, load_up(i)), activate_gradient8(g)));
    }
}
