// g[c] += inverse[c] · Σ_m dy[m, c] · z[m, c]
//
// What is added to g is no product, which a compiler could round once with the sum: so that adding
// the gradients of micro-batches that were computed apart gives the same bits.
//
// dy, z (rows, columns), inverse and g (columns) float32. An invocation per column.
// Launcher: ops/dora.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= dy.rows
    columns: u32, //= dy.columns
    stride: u32, //= dy.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 1
//#input 2 z: 1
@group(0) @binding(3) var<storage, read> inverse: array<f32>;
@group(0) @binding(4) var<storage, read_write> g: array<f32>;

fn each(i: u32) {
    if (i >= params.columns) {
        return;
    }
    let scale = inverse[i];
    var sum = 0.0;
    // Software GPUs leave loops after 65,535 turns of all columns.
    for (var m = 0u; m < params.rows; m += 8u) {
        //#unroll r 8: if (m + $ru < params.rows) { let at = (m + $ru) * params.stride + i; sum += scale * load_dy(at) * load_z(at); }
    }
    g[i] += sum;
}
