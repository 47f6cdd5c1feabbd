// dx = dy · act'(x), element by element. dy float32 or (DY_BF16) bfloat16; x, dx operands of one layout; dx overwritten.
// Launcher: ops/activation.py.
//#include common/flat.wgsl
//#include common/gradient_in.wgsl
//#include common/operand_out.wgsl OPERAND=dx OPERAND_BINDING=3
//#include common/activation.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> x: array<Unit8>;

fn each(i: u32) {
    if (i < params.units) {
        let v = x[i];
        store_dx(i, gradient(2u * i) * activate_gradient(lo8(v)), gradient(2u * i + 1u) * activate_gradient(hi8(v)));
    }
}
