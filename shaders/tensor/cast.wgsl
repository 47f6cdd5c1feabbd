// y = bfloat16(x), element by element, of one layout. Launcher: ops/tensor.py.
//#include common/bfloat16.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> y: array<vec2<u32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let i = (group.y * groups.x + group.x) * 64u + local.x;
    if (i < params.units) {
        y[i] = pack_bf16(x[i]);
    }
}
