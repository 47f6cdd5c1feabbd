// gradient[j, t] += Σ_m du[m, j]  over the places m of each token t, from its first one on.
//
// A workgroup for each place and THREADS ranks, so that all its invocations walk alike; no two write
// one column. following: trained_rows/following.wgsl. du (rows, r), gradient (r, vocabulary), both
// float32. Launcher: ops/lora_ends.py.

struct Params {
    rows: u32, //= du.rows
    r: u32,
    du_stride: u32,
    stride: u32, //= gradient.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
@group(0) @binding(2) var<storage, read> following: array<u32>;
//#input 3 du: 1 float32
@group(0) @binding(4) var<storage, read_write> gradient: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m = group.x;
    let rank = group.y * THREADS + thread;
    if (following[m] >= 0x80000000u || rank >= params.r) {
        return;
    }
    var sum = 0.0;
    var place = m;
    while (place < params.rows) {
        sum += load_du(place * params.du_stride + rank);
        place = following[place] & 0x7fffffffu;
    }
    gradient[rank * params.stride + ids[m]] += sum;
}
