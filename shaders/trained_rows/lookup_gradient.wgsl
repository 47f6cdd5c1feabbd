// gradient[slots[t], :] = scale · Σ_m dy[m, :]  over the places m of a token t, from its first one on.
//
// A workgroup for each place and THREADS units of its row, so that all its invocations walk alike.
// following: trained_rows/following.wgsl. dy (rows, ·), gradient (trained rows, ·) float32: rows of
// tokens that are nowhere are left alone. Launcher: ops/trained_gradients.py.

struct Params {
    rows: u32, //= dy.rows
    stride: u32, //= dy.stride
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> slots: array<u32>;
@group(0) @binding(3) var<storage, read> following: array<u32>;
//#input 4 dy: 4
@group(0) @binding(5) var<storage, read_write> gradient: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m = group.x;
    let unit = group.y * THREADS + thread;
    if (following[m] >= 0x80000000u || unit >= params.stride) {
        return;
    }
    var sum = vec4<f32>(0.0);
    var place = m;
    while (place < params.rows) {
        sum += load_dy(place * params.stride + unit);
        place = following[place] & 0x7fffffffu;
    }
    gradient[slots[ids[m]] * params.stride + unit] = params.scale * sum;
}
