// partial[w] = Σ g² over the slice of the flat gradient that invocation w owns.
//
// g float32 in units of four; partial (PARTIALS) overwritten. Launcher: ops/adamw.py.

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> g: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> partial: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= PARTIALS) {
        return;
    }
    var sum = 0.0;
    for (var i = id.x; i < params.units; i += PARTIALS) {
        sum += dot(g[i], g[i]);
    }
    partial[id.x] = sum;
}
