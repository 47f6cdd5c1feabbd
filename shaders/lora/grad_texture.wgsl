// The gradient of A or B: common/lora_grad.wgsl, for software adapters: x lies in a texture; each
// invocation holds eight columns by eight ranks, rows of u are loaded one by each invocation of the
// subgroup and broadcast.
//#include common/lora_grad.wgsl
//#input 1 x: 8 texture
@group(0) @binding(3) var<storage, read_write> g: array<vec4<f32>>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = group.x * THREADS + local.x;
    let rank = group.y * 2u;
    let c = min(column, params.x_stride - 1u);
    // e_j, o_j: rank 8 · group.y + j against the even and the odd ones of eight columns.
    //#unroll j 8: var e_$j = vec4<f32>(0.0); var o_$j = vec4<f32>(0.0);
    let end = rows_end(group.z);
    for (var m0 = first_row(group.z); m0 < end; m0 += THREADS) {
        let own = m0 + local.x;
        let u_at = min(own, end - 1u) * params.r_stride + rank;
        // Rows past the last count as zero.
        let exists = select(0.0, 1.0, own < end);
        let u_lo = load_u(u_at) * exists;
        let u_hi = load_u(u_at + 1u) * exists;
        //#unroll s THREADS
            {
                let v = row(min(m0 + $su, end - 1u), c);
                let lo = broadcast_u_$s(u_lo);
                let hi = broadcast_u_$s(u_hi);
                //#unroll j 4: e_$j += lo[$ju] * v.even; o_$j += lo[$ju] * v.odd;
                e_4 += hi.x * v.even; o_4 += hi.x * v.odd;
                e_5 += hi.y * v.even; o_5 += hi.y * v.odd;
                e_6 += hi.z * v.even; o_6 += hi.z * v.odd;
                e_7 += hi.w * v.even; o_7 += hi.w * v.odd;
            }
        //#end
    }
    if (8u * column < params.x_columns) {
        let g0 = group.z * params.lora_expert;
//#if TRANSPOSED
        //#unroll j 8: add_rank(g0, 8u * group.y + $ju, column, e_$j, o_$j);
//#else
        //#unroll i 4
            add_column(g0, 8u * column + 2u * $iu, rank, vec4<f32>(e_0[$iu], e_1[$iu], e_2[$iu], e_3[$iu]), vec4<f32>(e_4[$iu], e_5[$iu], e_6[$iu], e_7[$iu]));
            add_column(g0, 8u * column + 2u * $iu + 1u, rank, vec4<f32>(o_0[$iu], o_1[$iu], o_2[$iu], o_3[$iu]), vec4<f32>(o_4[$iu], o_5[$iu], o_6[$iu], o_7[$iu]));
        //#end
//#endif
    }
}

fn row(m: u32, c: u32) -> Eight {
    let at = m * params.x_stride + c;
//#if DROPOUT
    return multiply8(load_x(at), dropout_mask8(8u * at));
//#else
    return load_x(at);
//#endif
}

//#if TRANSPOSED
fn add_rank(g0: u32, j: u32, column: u32, even: vec4<f32>, odd: vec4<f32>) {
    if (j < params.r) {
        let at = g0 + j * params.g_stride + 2u * column;
        g[at] += vec4<f32>(even.x, odd.x, even.y, odd.y);
        g[at + 1u] += vec4<f32>(even.z, odd.z, even.w, odd.w);
    }
}
//#else
fn add_column(g0: u32, c: u32, rank: u32, lo: vec4<f32>, hi: vec4<f32>) {
    if (c < params.x_columns) {
        let at = g0 + c * params.g_stride + rank;
        g[at] += lo;
        g[at + 1u] += hi;
    }
}
//#endif
