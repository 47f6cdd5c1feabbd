// What kernels of Mamba 2's scan share. Tokens are processed in chunks of CHUNK = 4 · FOURS; heads of
// intermediates are those of the launch, from first_head on. state_units (of a state's rows, the elements
// of B and C), head_units (of its columns, the elements of x), strides and c_at, C's first column in bc, count
// four elements. bc is (rows, 2 · groups · state_size): B of all groups, then C.
//
// tokens (rows, heads, 8): (a, dt, into, out of), (whether it counts, kept, D, 0), where a = dt · A is the
// log decay, GONE where a sample begins; into = exp(Σ a of the chunk up to the token), zero in padding; out
// of = exp(Σ a of the chunk after it); kept = exp(Σ a of the chunk). a, dt and D are zero in padding.
// pairs (rows, heads, CHUNK): Γ_ij · C_i·B_j for the tokens j ≤ i of i's chunk, Γ_ij = exp(Σ a after j up to
// i); zero for padding i.
// states (sequences, heads, chunks, 2, state_size, head_dim): the state S before each chunk, and dS after it.

struct Params {
    seq: u32,
    chunks: u32,
    heads: u32,
    first_head: u32,
    group: u32,
    state_units: u32,
    c_at: u32,
    head_units: u32,
    state_stride: u32,
    head_stride: u32,
    dt_stride: u32,
}

const FOURS = CHUNK / 4u;
const GONE = -1.0e4;

// exp of a sum of log decays; all below is zero.
fn kept(sum: f32) -> f32 {
    return exp(max(sum, -200.0));
}

fn count_of(first: u32) -> u32 {
    return min(CHUNK, params.seq - first);
}
