// What kernels of Mamba 2's scan on software adapters share: a workgroup is a subgroup of THREADS. Units
// are of eight elements; an invocation has SETS tokens of a chunk, THREADS apart, and what all need is loaded
// a row by each of SPAN invocations and broadcast, BLOCKS times for eight rows.
//
// tokens (rows, heads, 8) as common/mamba_scan.wgsl has them, and pairs (rows, groups, CHUNK): C_i·B_j for all
// tokens j of i's chunk. states (sequences, heads, chunks, state_size, head_dim).
//#include common/mamba_scan.wgsl

// Element i of eight neighbours; i is a constant where it matters.
fn element(v: Eight, i: u32) -> f32 {
    return select(v.even[i / 2u], v.odd[i / 2u], i % 2u == 1u);
}

fn first_unit_of_state(sequence: u32, head: u32, chunk: u32) -> u32 {
    return ((sequence * params.heads + head) * params.chunks + chunk) * 8u * params.state_units * params.head_units;
}
