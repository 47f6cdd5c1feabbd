// gradient[t - row0, :] += scale · Σ_m dy[m, :]  over the places m of each token t of these rows, from
// its first one on.
//
// A workgroup for each place and THREADS units of its row, so that all its invocations walk alike.
// following: trained_rows/following.wgsl. dy (rows, ·), gradient (count, ·) float32, added to.
// Launcher: ops/trained_gradients.py.

struct Params {
    rows: u32, //= dy.rows
    stride: u32, //= dy.stride
    scale: f32,
    row0: u32,
    count: u32, //= gradient.rows
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> following: array<u32>;
//#input 3 dy: 4
@group(0) @binding(4) var<storage, read_write> gradient: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m = group.x;
    let unit = group.y * THREADS + thread;
    let token = ids[m];
    let is_here = token >= params.row0 && token - params.row0 < params.count;
    if (!is_here || following[m] >= 0x80000000u || unit >= params.stride) {
        return;
    }
    var sum = vec4<f32>(0.0);
    var place = m;
    while (place < params.rows) {
        sum += load_dy(place * params.stride + unit);
        place = following[place] & 0x7fffffffu;
    }
    gradient[(token - params.row0) * params.stride + unit] += params.scale * sum;
}
