// The gradient of A or B: common/lora_grad.wgsl. Each invocation holds four columns by four ranks;
// ROW_THREADS of a workgroup share the rows (SPREAD) on GPUs.
//
// Of several layers of one input x1 and x2 are further columns, from units begin1 and begin2 on; u has
// the layers' ranks side by side, and g the layers' rows one below the other.
//
// With xa, ua and ga the launch is both: x, u and g are B's, whose groups_b workgroups, across_b to a
// row of ranks, come first along x; xa, ua and ga are A's.
//#include common/lora_grad.wgsl
//#input 1 x: 4
//#input 6 x1?: 4
//#input 7 x2?: 4
//#input 8 xa?: 4
//#input 9 ua?: 4 float32 buffer

// What a workgroup makes: whose gradient, and which columns and ranks of it.
struct Part {
    of_a: bool,
    columns: u32,
    ranks: u32,
    c: u32,
    j: u32,
}

fn part(group: vec3<u32>) -> Part {
//#if xa
    var own = Part(false, params.x_columns, params.r, group.x % params.across_b, group.x / params.across_b);
    if (group.x >= params.groups_b) {
        let i = group.x - params.groups_b;
        own = Part(true, params.xa_columns, params.ra, i % params.across_a, i / params.across_a);
    }
    return own;
//#else
//#if TRANSPOSED
    return Part(true, params.x_columns, params.r, group.x, group.y);
//#else
    return Part(false, params.x_columns, params.r, group.x, group.y);
//#endif
//#endif
}

@compute @workgroup_size(THREADS, ROW_THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let own = part(group);
    let c = own.c * THREADS + local.x;
    let end = select(0u, rows_end(group.z), 4u * c < own.columns);
    // sums.v_i: column 4c + i against ranks 4j .. 4j+3.
    var sums = Sums(vec4<f32>(0.0), vec4<f32>(0.0), vec4<f32>(0.0), vec4<f32>(0.0));
//#if xa
    // Both meet the same barrier: Direct3D's FXC allows none in a branch that it cannot see through.
    if (own.of_a) {
        for (var m = first_row(group.z) + local.y; m < end; m += ROW_THREADS) {
            var v = load_xa(m * params.xa_stride + c);
//#if DROPOUT
            v *= dropout_mask4((m * params.xa_stride + c) * 4u);
//#endif
            let w = load_ua(m * params.r_stride + own.j);
            //#unroll i 4: sums.v_$i += v[$i] * w;
        }
    }
    let end_b = select(end, 0u, own.of_a);
//#else
    let end_b = end;
//#endif
//#if x1
    let u_at = (u32(c >= params.begin1) + u32(c >= params.begin2)) * (params.r / 4u) + own.j;
//#else
    let u_at = own.j;
//#endif
    for (var m = first_row(group.z) + local.y; m < end_b; m += ROW_THREADS) {
        var v = load_columns(m, c);
//#if !xa
//#if DROPOUT
        v *= dropout_mask4((m * params.x_stride + c) * 4u);
//#endif
//#endif
        let w = load_u(m * params.r_stride + u_at);
        //#unroll i 4: sums.v_$i += v[$i] * w;
    }
    add_to_gradient(own, group.z, local, sums);
}

fn load_columns(m: u32, c: u32) -> vec4<f32> {
//#if x2
    if (c >= params.begin2) {
        return load_x2(m * params.stride2 + c - params.begin2);
    }
//#endif
//#if x1
    if (c >= params.begin1) {
        return load_x1(m * params.stride1 + c - params.begin1);
    }
//#endif
    return load_x(m * params.x_stride + c);
}

struct Sums {
    v_0: vec4<f32>,
    v_1: vec4<f32>,
    v_2: vec4<f32>,
    v_3: vec4<f32>,
}

//#if SPREAD
@group(0) @binding(3) var<storage, read_write> g: array<f32>;
//#if xa
@group(0) @binding(10) var<storage, read_write> ga: array<f32>;
//#endif
// The invocations' sums: all their v_0, then all their v_1, so that neighbours store side by side.
var<workgroup> partial: array<vec4<f32>, 4u * THREADS * ROW_THREADS>;

// Each invocation adds up its share of the results, one rank of one column at a time.
fn add_to_gradient(part: Part, expert: u32, local: vec3<u32>, sums: Sums) {
    let own = local.y * THREADS + local.x;
    //#unroll i 4: partial[$iu * THREADS * ROW_THREADS + own] = sums.v_$i;
    workgroupBarrier();
    for (var e = own; e < 16u * THREADS; e += THREADS * ROW_THREADS) {
        let i = e / (4u * THREADS);
        let x = e / 4u % THREADS;
        var sum = 0.0;
        for (var y = 0u; y < ROW_THREADS; y += 1u) {
            sum += partial[(i * ROW_THREADS + y) * THREADS + x][e % 4u];
        }
        let column = 4u * (part.c * THREADS + x) + i;
        let rank = 4u * part.j + e % 4u;
        if (column < part.columns && rank < part.ranks) {
            add(part.of_a, expert, column, rank, sum);
        }
    }
}

fn add(of_a: bool, expert: u32, column: u32, rank: u32, sum: f32) {
//#if xa
    if (of_a) {
        ga[4u * (expert * params.lora_expert_a + rank * params.ga_stride) + column] += sum;
    } else {
        g[4u * (expert * params.lora_expert + column * params.g_stride) + rank] += sum;
    }
//#else
    let at = select(column * params.g_stride, rank * params.g_stride, of_a);
    g[4u * (expert * params.lora_expert + at) + select(rank, column, of_a)] += sum;
//#endif
}
//#else
@group(0) @binding(3) var<storage, read_write> g: array<vec4<f32>>;

fn add_to_gradient(part: Part, expert: u32, local: vec3<u32>, sums: Sums) {
    let c = part.c * THREADS + local.x;
    let j = part.j;
    if (4u * c >= part.columns) {
        return;
    }
//#if TRANSPOSED
    let first = expert * params.lora_expert + 4u * j * params.g_stride + c;
    //#unroll i 4
        if (4u * j + $iu < part.ranks) {
            g[first + $iu * params.g_stride] += vec4<f32>(sums.v_0[$i], sums.v_1[$i], sums.v_2[$i], sums.v_3[$i]);
        }
    //#end
//#else
    let first = expert * params.lora_expert + 4u * c * params.g_stride + j;
    //#unroll i 4
        if (4u * c + $iu < part.columns) {
            g[first + $iu * params.g_stride] += sums.v_$i;
        }
    //#end
//#endif
}
//#endif
