// f16 copies of what attention's kernels on matrix units walk over and over: of a and b, which are
// of one shape. BACKWARD: b is dout, and multiplied by the power of two that puts the largest of the
// sequence's, in heads of q that share a key, just below 2¹⁵. Else what is finite and beyond f16's
// end is counted in `saturated`.
//
// (rows, stride) units of eight; a workgroup takes ROWS rows of one head of keys, `across` units
// wide. Launcher: kernels/attention/matrix_units.py.
struct Params {
    rows: u32, //= a.rows
    seq: u32,
    heads: u32,
    group: u32,
    stride: u32, //= a.stride
    across: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 a: 8
//#input 2 b: 8
//#output 3 a_factors: 8
//#output 4 b_factors: 8
//#if BACKWARD
@group(0) @binding(5) var<storage, read> lse_delta: array<vec2<f32>>;
//#endif
//#if saturated
@group(0) @binding(15) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif
//#if BACKWARD
//#include common/attention_sizes.wgsl

var<workgroup> memory: array<vec4<u32>, THREADS>;
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * ROWS;
    let rows = min(ROWS, params.seq - first);
    let begin = (group.z * params.seq + first) * params.stride + group.y * params.across;
//#if BACKWARD
    let largest = largest_of_walk(group.z, group.y * params.group, params.group, 0u, params.seq - 1u, index);
    let scale = power(exponent_of_scale(largest.x));
//#else
    let scale = 1.0;
//#endif
    var beyond = 0u;
    for (var i = index; i < rows * params.across; i += THREADS) {
        let at = begin + i / params.across * params.stride + i % params.across;
        let from_a = load_a(at);
        let from_b = load_b(at);
//#if saturated
        beyond += beyond8(from_a) + beyond8(from_b);
//#endif
        store_a_factors(at, from_a);
        store_b_factors(at, scale8(from_b, scale));
    }
//#if saturated
    if (beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
}
