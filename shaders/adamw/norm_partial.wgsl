// partial[w] = Σ g² over the slice of the flat gradient that invocation w owns.
//
// g float32 in units of four; partial (PARTIALS) overwritten. Launcher: ops/adamw.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> partial: array<f32>;

fn each(first: u32) {
    if (first >= PARTIALS) {
        return;
    }
    var sum = 0.0;
    for (var i = first; i < params.units; i += PARTIALS) {
        sum += dot(g[i], g[i]);
    }
    partial[first] = sum;
}
