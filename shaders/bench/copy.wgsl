// Moves 16-byte words from one buffer to another: what an adapter's memory gives a plain kernel.
// Launcher: bench/ceilings.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec4<u32>>;

fn each(i: u32) {
    if (i < params.units) {
        y[i] = x[i];
    }
}
