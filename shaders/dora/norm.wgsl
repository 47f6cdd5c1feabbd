// inverse[row0 + n] = 1 / ‖w[n, :] + scale · Σ_j b[row0 + n, j] · a[j, :]‖, or (PLAIN) the norm.
//
// w (rows, columns), a shard of a matrix's rows; a (r, columns), b (·, r) float32; inverse float32,
// overwritten for these rows. THREADS invocations share a row. Launcher: ops/dora.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= w.rows
    row0: u32,
    stride: u32, //= w.stride
    r: u32,
    r_stride: u32, //= b.stride
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 w: 4
@group(0) @binding(2) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> b: array<f32>;
@group(0) @binding(4) var<storage, read_write> inverse: array<f32>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // Every invocation reaches the barriers: a row past the end repeats the last one.
    let row = min(group.x * ROWS + local.y, params.rows - 1u);
    let b_at = (params.row0 + row) * params.r_stride;
    var sum = 0.0;
    for (var i = local.x; i < params.stride; i += THREADS) {
        var v = vec4<f32>(0.0);
        for (var j = 0u; j < params.r; j += 1u) {
            v += b[b_at + j] * a[j * params.stride + i];
        }
        v = load_w(row * params.stride + i) + params.scale * v;
        sum += dot(v, v);
    }
    let total = reduce_sum(sum, local.x);
    if (local.x == 0u) {
//#if PLAIN
        inverse[params.row0 + row] = sqrt(total);
//#else
        inverse[params.row0 + row] = select(0.0, inverseSqrt(total), total > 0.0);
//#endif
    }
}
