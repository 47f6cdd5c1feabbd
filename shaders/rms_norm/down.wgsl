// y = x · rstd · weight, as rms_norm/forward.wgsl makes it, and of what is stored of it
// u = scale · y · aᵀ, for few rows: the norm of a linear layer's input and its LoRA's u.
//
// x, y (rows, columns), weight (columns), a (ranks, columns), u (rows, ranks) float32, its padding
// zeros. THREADS invocations make eight columns of u of EACH rows, for which they read a once; each
// workgroup makes the norm again, and the first one stores it. Launcher: ops/fusion.py.
//#include common/row_reduce.wgsl

struct Params {
    rows: u32, //= x.rows
    columns: u32, //= x.columns
    stride: u32, //= x.stride
    a_stride: u32,
    u_stride: u32,
    ranks: u32,
    eps: f32,
    scale: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 weight: 8 float32
//#output 3 y: 8
//#input 4 a: 8
//#output 5 u: 4 float32

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let rank = 8u * place.x;
    let thread = local.x;
    let m0 = place.y * EACH;
    //#unroll e EACH
        let base_$e = min(m0 + $eu, params.rows - 1u) * params.stride;
        var total_$e = 0.0;
    //#end
    for (var i = thread; i < params.stride; i += THREADS) {
        //#unroll e EACH
            let x_$e = load_x(base_$e + i);
            total_$e += dot8(x_$e, x_$e);
        //#end
    }
    //#unroll e EACH: let r_$e = inverseSqrt(reduce_sum(total_$e, thread) / f32(params.columns) + params.eps);
    //#unroll j 8: let a_at_$j = min(rank + $ju, params.ranks - 1u) * params.a_stride;
    //#unroll e EACH, j 8: var sum_$e_$j = 0.0;
    for (var i = thread; i < params.stride; i += THREADS) {
        let weight = load_weight(i);
        //#unroll j 8: let a_$j = load_a(a_at_$j + i);
        //#unroll e EACH
            let v_$e = multiply8(scale8(load_x(base_$e + i), r_$e), weight);
            if (place.x == 0u && m0 + $eu < params.rows) {
                store_y(base_$e + i, v_$e);
            }
            let stored_$e = rounded_y(v_$e);
            //#unroll j 8: sum_$e_$j += tree8(stored_$e, a_$j);
        //#end
    }
    //#unroll e EACH
        let all_$e = total8(vec4<f32>(sum_$e_0, sum_$e_1, sum_$e_2, sum_$e_3), vec4<f32>(sum_$e_4, sum_$e_5, sum_$e_6, sum_$e_7), thread);
        if (thread == 0u && m0 + $eu < params.rows) {
            store_ranks(m0 + $eu, rank, all_$e.lo);
            store_ranks(m0 + $eu, rank + 4u, all_$e.hi);
        }
    //#end
}

// Four columns of a row's u, zero past the last one.
fn store_ranks(row: u32, rank: u32, sums: vec4<f32>) {
    let ranks = vec4<u32>(rank) + vec4<u32>(0u, 1u, 2u, 3u);
    let v = select(vec4<f32>(0.0), params.scale * sums, ranks < vec4<u32>(params.ranks));
    store_u(row * params.u_stride + rank / 4u, v);
}

// The sums over the workgroup, whole for its first invocation.
//#if SUBGROUP
fn total8(low: vec4<f32>, high: vec4<f32>, thread: u32) -> Float8 {
    return Float8(subgroupAdd(low), subgroupAdd(high));
}
//#else
var<workgroup> sums: array<Float8, THREADS>;

fn total8(low: vec4<f32>, high: vec4<f32>, thread: u32) -> Float8 {
    sums[thread] = Float8(low, high);
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (thread < half) {
            sums[thread].lo += sums[thread + half].lo;
            sums[thread].hi += sums[thread + half].hi;
        }
    }
    return sums[thread];
}
//#endif
//#include common/tree8.wgsl
