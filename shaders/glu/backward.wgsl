// dup = dy · act(gate),  dgate = dy · up · act'(gate), element by element.
//
// dy float32 or (DY_BF16) bfloat16; gate, up, dgate, dup: operands of one layout; both outputs overwritten.
// Launcher: ops/glu.py.
//#include common/flat.wgsl
//#include common/gradient_in.wgsl
//#include common/operand_out.wgsl OPERAND=dgate OPERAND_BINDING=4
//#include common/operand_out.wgsl OPERAND=dup OPERAND_BINDING=5
//#include common/activation.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> gate: array<Unit8>;
@group(0) @binding(3) var<storage, read> up: array<Unit8>;

fn each(i: u32) {
    if (i < params.units) {
        let g = gate[i];
        let u = up[i];
        let lo = gradient(2u * i);
        let hi = gradient(2u * i + 1u);
        store_dup(i, lo * activate(lo8(g)), hi * activate(hi8(g)));
        store_dgate(i, lo * lo8(u) * activate_gradient(lo8(g)), hi * hi8(u) * activate_gradient(hi8(g)));
    }
}
