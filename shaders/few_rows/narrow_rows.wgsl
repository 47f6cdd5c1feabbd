// y[m, j] = scale · Σ_k x[m, k] · w[j, k] for software adapters and more than a few rows: what
// few_rows/narrow.wgsl makes, to the bit, or with weight what rms_norm/down.wgsl makes, where the
// product is that of normed = x · rstd · weight, which is stored, too.
//
// x, normed (rows, columns), weight (columns), w (ranks, columns), y (rows, ranks), its padding zeros.
// A workgroup is one subgroup of THREADS, each invocation with a row and RANKS columns of y: they load
// a unit of w together, in halves, and broadcast these. No sums are exchanged, but have the order of
// invocations that share a row: first those of every THREADS-th unit, then these one after the other.
// Launchers: kernels/gemm/few_rows.py, ops/fusion.py.
struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
    w_stride: u32,
    y_stride: u32,
    ranks: u32,
    eps: f32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 weight?: 4 float32
//#if weight
//#output 3 normed: 8
//#endif
//#input 4 w: 4 float32
//#output 5 y: 4 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let rank = RANKS * place.x;
    let row = place.y * THREADS + local.x;
    // No invocation leaves alone: a broadcast needs all of them. Those past the end repeat the last.
    let base = min(row, params.rows - 1u) * params.stride;
//#if weight
    var squares = 0.0;
    for (var lane = 0u; lane < THREADS; lane += 1u) {
        var part = 0.0;
        for (var i = lane; i < params.stride; i += THREADS) {
            let x = load_x(base + i);
            part += dot8(x, x);
        }
        squares += part;
    }
    let r = inverseSqrt(squares / f32(params.columns) + params.eps);
//#endif
    // Half a unit of w for each invocation and load.
    //#unroll n LOADS: let w_at_$n = min(rank + ($nu * THREADS + local.x) / 2u, params.ranks - 1u) * params.w_stride + local.x % 2u;
    //#unroll j RANKS: var sum_$j = 0.0;
    for (var lane = 0u; lane < THREADS; lane += 1u) {
        //#unroll j RANKS: var part_$j = 0.0;
        for (var i = lane; i < params.stride; i += THREADS) {
            var halves: array<vec4<f32>, LOADS>;
            //#unroll n LOADS: halves[$n] = load_w(w_at_$n + 2u * i);
//#if weight
            let half = load_weight(2u * i + local.x % 2u);
            let weights = eight(broadcast_weight_0(half), broadcast_weight_1(half));
            let made = multiply8(scale8(load_x(base + i), r), weights);
            if (place.x == 0u && row < params.rows) {
                store_normed(base + i, made);
            }
            let v = rounded_normed(made);
//#else
            let v = load_x(base + i);
//#endif
            //#unroll j RANKS
                let w_$j = eight(
                    subgroupBroadcast(halves[2u * $ju / THREADS], 2u * $ju % THREADS),
                    subgroupBroadcast(halves[2u * $ju / THREADS], (2u * $ju + 1u) % THREADS),
                );
                part_$j += tree8(v, w_$j);
            //#end
        }
        //#unroll j RANKS: sum_$j += part_$j;
    }
    if (row < params.rows) {
        var sums: array<f32, RANKS>;
        //#unroll j RANKS: sums[$j] = select(0.0, params.scale * sum_$j, rank + $ju < params.ranks);
        //#unroll q FOURS
            if (rank + 4u * $qu < 4u * params.y_stride) {
                store_y(row * params.y_stride + rank / 4u + $qu, vec4<f32>(sums[4 * $q], sums[4 * $q + 1], sums[4 * $q + 2], sums[4 * $q + 3]));
            }
        //#end
    }
}
//#include common/tree8.wgsl
