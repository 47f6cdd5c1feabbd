// y = act(gate) · up, element by element: SwiGLU with SILU, else GeGLU (tanh form).
//
// gate, up, y: operands of one layout; y overwritten, zero padding stays zero.
// Launcher: ops/glu.py.
//#include common/flat.wgsl
//#include common/operand_out.wgsl OPERAND=y OPERAND_BINDING=3
//#include common/activation.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> gate: array<Unit8>;
@group(0) @binding(2) var<storage, read> up: array<Unit8>;

fn each(i: u32) {
    if (i < params.units) {
        let g = gate[i];
        let u = up[i];
        store_y(i, activate(lo8(g)) * lo8(u), activate(hi8(g)) * hi8(u));
    }
}
