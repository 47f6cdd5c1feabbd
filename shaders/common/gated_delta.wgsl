// What kernels of the gated delta rule share. Tokens come in chunks of CHUNK = 4 · FOURS; heads of
// intermediates are those of the launch, from first_head on. key_units, value_units and strides count
// four elements. ĝ is the log decay: GONE where a sample begins, zero in padding, where q and k are, too.
//
// tokens (rows, heads, 8): (q's scale, k's scale, beta, ĝ), (into, out of, whether it counts, 0), where
// into = exp(Σ ĝ of the chunk up to the token) and out of = exp(Σ ĝ of the chunk after it).
// pairs (rows, heads, PAIRS, CHUNK): T = (I + A)⁻¹, P = Γ ⊙ q̂·k̂ᵀ and, with PAIRS 3, N = Γ ⊙ k̂·k̂ᵀ below
// its diagonal, of a chunk's token with each of its tokens; A = beta · N, Γ_ij = exp(Σ ĝ after j up to i).

struct Params {
    seq: u32,
    chunks: u32,
    heads: u32,
    first_head: u32,
    group: u32,
    key_units: u32,
    value_units: u32,
    key_stride: u32,
    value_stride: u32,
    gate_stride: u32,
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
