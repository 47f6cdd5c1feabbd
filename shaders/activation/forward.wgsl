// y = act(x), element by element. x, y: operands of one layout; y overwritten, zero padding stays
// zero. Launcher: ops/activation.py.
//#include common/flat.wgsl
//#include common/operand_out.wgsl OPERAND=y OPERAND_BINDING=2
//#include common/activation.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<Unit8>;

fn each(i: u32) {
    if (i < params.units) {
        let v = x[i];
        store_y(i, activate(lo8(v)), activate(hi8(v)));
    }
}
