// u[m, j] = scale · a[j, ids[m]]: the columns of A that a batch's tokens look up.
//
// ids (rows), a (r, vocabulary) float32, u (rows, r) float32: overwritten, its padding with zeros.
// Launcher: ops/lora_ends.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= u.rows
    columns: u32, //= u.columns
    stride: u32, //= u.stride
    a_stride: u32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
//#input 2 a: 1 float32 table
//#output 3 u: 4 float32

fn each(i: u32) {
    let m = i / params.stride;
    if (m >= params.rows) {
        return;
    }
    let unit = i % params.stride;
    var v = vec4<f32>(0.0);
    for (var k = 0u; k < 4u; k += 1u) {
        let rank = 4u * unit + k;
        if (rank < params.columns) {
            v[k] = params.scale * load_a(rank * params.a_stride + ids[m]);
        }
    }
    store_u(i, v);
}
