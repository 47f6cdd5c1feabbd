// The gradient of A or B: a sum over the batch's rows of outer products.
//
// g[c, j] += Σ_m x[m, c] · u[m, j]      dB = dyᵀ·u:  x = dy,  g (columns, r)
// g[j, c] += Σ_m x[m, c] · u[m, j]      dA = duᵀ·x:  TRANSPOSED, x masked as its forward was
//                                       (DROPOUT),  g (r, columns)
// lora/grad.wgsl for software adapters: x is an image from x_unit0 on; each invocation holds eight
// columns by eight ranks, rows of u are loaded one by each invocation of the subgroup and broadcast.
// Launcher: ops/gemm_image.py.
//#include common/image8.wgsl

struct Params {
    rows: u32,
    x_columns: u32,
    x_unit0: u32,
    x_stride: u32,
    r: u32,
    r_stride: u32,
    g_stride: u32,
    module_key: u32,
    keep_below: u32,
    keep_scale: f32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var x: texture_storage_2d<rgba32uint, read>;
@group(0) @binding(2) var<storage, read> u: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> g: array<vec4<f32>>;
//#if DROPOUT
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
//#include common/dropout.wgsl
//#endif

//#include common/expert_rows.wgsl

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = group.x * LANES + local.x;
    let rank = group.y * 2u;
    let c = min(column, params.x_stride - 1u);
    // e_j, o_j: rank 8 · group.y + j against the even and the odd ones of eight columns.
    //#unroll j 8: var e_$j = vec4<f32>(0.0); var o_$j = vec4<f32>(0.0);
    let end = rows_end(group.z);
    for (var m0 = first_row(group.z); m0 < end; m0 += LANES) {
        let own = m0 + local.x;
        let u_at = min(own, end - 1u) * params.r_stride + rank;
        // Rows past the last count as zero.
        let exists = select(0.0, 1.0, own < end);
        let u_lo = u[u_at] * exists;
        let u_hi = u[u_at + 1u] * exists;
        //#unroll s LANES: { let m = min(m0 + $su, end - 1u); let v = row(m, c); let lo = subgroupBroadcast(u_lo, $su); let hi = subgroupBroadcast(u_hi, $su); e_0 += lo.x * v.even; o_0 += lo.x * v.odd; e_1 += lo.y * v.even; o_1 += lo.y * v.odd; e_2 += lo.z * v.even; o_2 += lo.z * v.odd; e_3 += lo.w * v.even; o_3 += lo.w * v.odd; e_4 += hi.x * v.even; o_4 += hi.x * v.odd; e_5 += hi.y * v.even; o_5 += hi.y * v.odd; e_6 += hi.z * v.even; o_6 += hi.z * v.odd; e_7 += hi.w * v.even; o_7 += hi.w * v.odd; }
    }
    if (8u * column < params.x_columns) {
        let g0 = group.z * params.lora_expert;
//#if TRANSPOSED
        //#unroll j 8: add_rank(g0, 8u * group.y + $ju, column, e_$j, o_$j);
//#else
        add_column(g0, 8u * column, rank, vec4<f32>(e_0.x, e_1.x, e_2.x, e_3.x), vec4<f32>(e_4.x, e_5.x, e_6.x, e_7.x));
        add_column(g0, 8u * column + 1u, rank, vec4<f32>(o_0.x, o_1.x, o_2.x, o_3.x), vec4<f32>(o_4.x, o_5.x, o_6.x, o_7.x));
        add_column(g0, 8u * column + 2u, rank, vec4<f32>(e_0.y, e_1.y, e_2.y, e_3.y), vec4<f32>(e_4.y, e_5.y, e_6.y, e_7.y));
        add_column(g0, 8u * column + 3u, rank, vec4<f32>(o_0.y, o_1.y, o_2.y, o_3.y), vec4<f32>(o_4.y, o_5.y, o_6.y, o_7.y));
        add_column(g0, 8u * column + 4u, rank, vec4<f32>(e_0.z, e_1.z, e_2.z, e_3.z), vec4<f32>(e_4.z, e_5.z, e_6.z, e_7.z));
        add_column(g0, 8u * column + 5u, rank, vec4<f32>(o_0.z, o_1.z, o_2.z, o_3.z), vec4<f32>(o_4.z, o_5.z, o_6.z, o_7.z));
        add_column(g0, 8u * column + 6u, rank, vec4<f32>(e_0.w, e_1.w, e_2.w, e_3.w), vec4<f32>(e_4.w, e_5.w, e_6.w, e_7.w));
        add_column(g0, 8u * column + 7u, rank, vec4<f32>(o_0.w, o_1.w, o_2.w, o_3.w), vec4<f32>(o_4.w, o_5.w, o_6.w, o_7.w));
//#endif
    }
}

fn row(m: u32, c: u32) -> Eight {
//#if BF16
    var v = load_bf16(x, params.x_unit0 + m * params.x_stride + c);
//#else
    var v = load_f32(x, params.x_unit0 + m * params.x_stride + c);
//#endif
//#if DROPOUT
    let i = (m * params.x_stride + c) * 8u;
    let lo = dropout_mask4(i);
    let hi = dropout_mask4(i + 4u);
    v = Eight(v.even * vec4<f32>(lo.xz, hi.xz), v.odd * vec4<f32>(lo.yw, hi.yw));
//#endif
    return v;
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
