// pairs_ij = own_i · other_j for all tokens j of i's chunk, of each group; overwritten.
//
// own and other are parts of bc from the units own_at and other_at of a row on: C and B, or B and C for the
// transposed matrix. A workgroup has THREADS tokens of a group. Launcher: kernels/mamba_chunks.py.

struct Params {
    seq: u32,
    groups: u32,
    state_units: u32,
    own_at: u32,
    other_at: u32,
    state_stride: u32, //= bc.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 bc: 8 texture
//#output 2 pairs: 8 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let i = group.x * THREADS + local.x;
    let row0 = group.z * params.seq;
    let row = row0 + min(i, params.seq - 1u);
    let first = group.x * THREADS / CHUNK * CHUNK;
    let group_at = group.y * params.state_units;
    let own_at = row * params.state_stride + params.own_at + group_at;
    for (var j = 0u; j < CHUNK; j += 8u) {
        //#unroll p BLOCKS
            let t_$p = first + j + $pu * SPAN + local.x % SPAN;
            let other_at_$p = (row0 + min(t_$p, params.seq - 1u)) * params.state_stride + params.other_at + group_at;
        //#end
        var sums: array<f32, 8>;
        //#unroll k 8: sums[$k] = 0.0;
        for (var n = 0u; n < params.state_units; n += 1u) {
            let own = load_bc(own_at + n);
            //#unroll p BLOCKS: let bc_$p = load_bc(other_at_$p + n);
            //#unroll p BLOCKS, s SPAN: sums[$p * SPAN + $s] += tree8(own, broadcast_bc_$s(bc_$p));
        }
        if (i < params.seq) {
            store_pairs((row * params.groups + group.y) * (CHUNK / 8u) + j / 8u, eight_of(sums));
        }
    }
}

//#include common/eight_of.wgsl
//#include common/tree8.wgsl
