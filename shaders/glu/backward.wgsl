// dup = dy · act(gate),  dgate = dy · up · act'(gate), element by element.
//
// dy float32; gate, up, dgate, dup: operands of one layout; both outputs overwritten.
// Launcher: ops/glu.py.
//#include common/unit4.wgsl
//#include common/activation.wgsl

struct Params {
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> dy: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> gate: array<Unit4>;
@group(0) @binding(3) var<storage, read> up: array<Unit4>;
@group(0) @binding(4) var<storage, read_write> dgate: array<Unit4>;
@group(0) @binding(5) var<storage, read_write> dup: array<Unit4>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let i = (group.y * groups.x + group.x) * 64u + local.x;
    if (i < params.units) {
        let g = unpack4(gate[i]);
        let d = dy[i];
        dup[i] = pack4(d * activate(g));
        dgate[i] = pack4(d * unpack4(up[i]) * activate_gradient(g));
    }
}
