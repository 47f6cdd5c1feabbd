// The gradient of A or B: common/lora_grad.wgsl. Each invocation holds four columns by four ranks;
// ROW_THREADS of a workgroup share the rows (SPREAD) on GPUs.
//#include common/lora_grad.wgsl
//#input 1 x: 4

//#if SPREAD
// Sums of the workgroup's invocations: 16 each, those that share columns ROW_THREADS apart.
var<workgroup> partial: array<vec4<f32>, 4u * THREADS * ROW_THREADS>;
//#endif

@compute @workgroup_size(THREADS, ROW_THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let c = group.x * THREADS + local.x;
    let j = group.y;
    let here = 4u * c < params.x_columns;
    // sum_i: column 4c + i against ranks 4j .. 4j+3.
    var sum_0 = vec4<f32>(0.0);
    var sum_1 = vec4<f32>(0.0);
    var sum_2 = vec4<f32>(0.0);
    var sum_3 = vec4<f32>(0.0);
    for (var m = first_row(group.z) + local.y; m < select(0u, rows_end(group.z), here); m += ROW_THREADS) {
        var v = load_x(m * params.x_stride + c);
//#if DROPOUT
        v *= dropout_mask4((m * params.x_stride + c) * 4u);
//#endif
        let w = load_u(m * params.r_stride + params.u_unit0 + j);
        sum_0 += v.x * w;
        sum_1 += v.y * w;
        sum_2 += v.z * w;
        sum_3 += v.w * w;
    }
//#if SPREAD
    let own = 4u * (local.y * THREADS + local.x);
    partial[own] = sum_0;
    partial[own + 1u] = sum_1;
    partial[own + 2u] = sum_2;
    partial[own + 3u] = sum_3;
    workgroupBarrier();
    for (var thread = 1u; thread < ROW_THREADS; thread += 1u) {
        let other = 4u * (thread * THREADS + local.x);
        sum_0 += partial[other];
        sum_1 += partial[other + 1u];
        sum_2 += partial[other + 2u];
        sum_3 += partial[other + 3u];
    }
    if (local.y > 0u) {
        return;
    }
//#endif
    if (!here) {
        return;
    }
//#if TRANSPOSED
    let at = group.z * params.lora_expert + 4u * j * params.g_stride + c;
    g[at] += vec4<f32>(sum_0.x, sum_1.x, sum_2.x, sum_3.x);
    if (4u * j + 1u < params.r) {
        g[at + params.g_stride] += vec4<f32>(sum_0.y, sum_1.y, sum_2.y, sum_3.y);
    }
    if (4u * j + 2u < params.r) {
        g[at + 2u * params.g_stride] += vec4<f32>(sum_0.z, sum_1.z, sum_2.z, sum_3.z);
    }
    if (4u * j + 3u < params.r) {
        g[at + 3u * params.g_stride] += vec4<f32>(sum_0.w, sum_1.w, sum_2.w, sum_3.w);
    }
//#else
    let at = group.z * params.lora_expert + 4u * c * params.g_stride + j;
    g[at] += sum_0;
    if (4u * c + 1u < params.x_columns) {
        g[at + params.g_stride] += sum_1;
    }
    if (4u * c + 2u < params.x_columns) {
        g[at + 2u * params.g_stride] += sum_2;
    }
    if (4u * c + 3u < params.x_columns) {
        g[at + 3u * params.g_stride] += sum_3;
    }
//#endif
}
