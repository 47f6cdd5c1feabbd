// y (+)= Σ_part x[part], float32: parts of one layout, one below the other in x, are added up in
// their order, into y or (ACCUMULATE) onto it. Launcher: ops/tensor.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
    parts: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 4 float32
//#output 2 y: 4 sum

fn each(i: u32) {
    if (i < params.units) {
        var sum = vec4<f32>(0.0);
        for (var part = 0u; part < params.parts; part += 1u) {
            sum += load_x(part * params.units + i);
        }
        store_y(i, sum);
    }
}
