// What an invocation sees of its subgroup: (size, index within it, a neighbour's word through a
// broadcast, a texel through a texture), so that kernels which rest on these are used only where
// they work. Launcher: gpu/probe.py.

struct Params {
    width: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var texture: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var<storage, read_write> seen: array<vec4<u32>>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_id) local: vec3<u32>, @builtin(subgroup_size) size: u32, @builtin(subgroup_invocation_id) index: u32) {
    let texel = textureLoad(texture, vec2<u32>(local.x % params.width, local.x / params.width));
    seen[local.x] = vec4<u32>(size, index, subgroupBroadcast(texel.x, 3u), texel.w);
}
