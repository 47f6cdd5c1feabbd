// y (+)= Σ_part x[part], float32: PARTS tensors of one layout, one below the other in x, are added
// up in their order, into y or (ACCUMULATE) onto it. Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
    parts: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;

fn each(i: u32) {
    if (i < params.units) {
//#if ACCUMULATE
        var sum = y[i];
//#else
        var sum = vec4<f32>(0.0);
//#endif
        for (var part = 0u; part < params.parts; part += 1u) {
            sum += x[part * params.units + i];
        }
        y[i] = sum;
    }
}
