// The gradient of A or B: common/lora_grad.wgsl. Each invocation holds four columns by FOURS times
// four ranks; ROW_THREADS of a workgroup share the rows (SPREAD) on GPUs.
//
// Of several layers of one input x1 and x2 are further columns, from units begin1 and begin2 on; u has
// the layers' ranks side by side, and g the layers' rows one below the other.
//
// With xa, ua and ga the launch is both: x, u and g are B's, whose groups_b workgroups come first along
// x, the down_b that read the same columns side by side; xa, ua and ga are A's.
//#include common/lora_grad.wgsl
//#include common/masked4.wgsl
//#input 1 x: 4
//#input 6 x1?: 4
//#input 7 x2?: 4
//#input 8 xa?: 4
//#input 9 ua?: 4 float32 buffer

const LATEST = (AHEAD - 1u) * ROW_THREADS; // of the rows that are loaded before the first is used

// What a workgroup makes: whose gradient, and which columns and ranks, from the j-th four on.
struct Part {
    of_a: bool,
    columns: u32,
    ranks: u32,
    c: u32,
    j: u32,
}

fn part(group: vec3<u32>) -> Part {
//#if xa
    var own = Part(false, params.x_columns, params.r, group.x / params.down_b, FOURS * (group.x % params.down_b));
    if (group.x >= params.groups_b) {
        let i = group.x - params.groups_b;
        own = Part(true, params.xa_columns, params.ra, i / params.down_a, FOURS * (i % params.down_a));
    }
    return own;
//#else
//#if TRANSPOSED
    return Part(true, params.x_columns, params.r, group.x, FOURS * group.y);
//#else
    return Part(false, params.x_columns, params.r, group.x, FOURS * group.y);
//#endif
//#endif
}

@compute @workgroup_size(THREADS, ROW_THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let own = part(group);
    let c = own.c * THREADS + local.x;
    let end = select(0u, rows_end(group.z), 4u * c < own.columns);
    // sums.v_i_q: column 4c + i against ranks 4(j + q) .. 4(j + q)+3.
    var sums: Sums;
//#if xa
    // Both meet the same barrier: Direct3D's FXC allows none in a branch that it cannot see through.
    if (own.of_a) {
        var m = first_row(group.z) + local.y;
        for (; m + LATEST < end; m += AHEAD * ROW_THREADS) {
            //#unroll t AHEAD
                let unit_$t = (m + $tu * ROW_THREADS) * params.xa_stride + c;
                let v_$t = masked4(load_xa(unit_$t), unit_$t);
                //#unroll q FOURS: let w_$t_$q = load_ua((m + $tu * ROW_THREADS) * params.r_stride + own.j + $qu);
            //#end
            //#unroll t AHEAD, i 4, q FOURS: sums.v_$i_$q += v_$t[$i] * w_$t_$q;
        }
        for (; m < end; m += ROW_THREADS) {
            let unit = m * params.xa_stride + c;
            let v = masked4(load_xa(unit), unit);
            //#unroll q FOURS: let w_$q = load_ua(m * params.r_stride + own.j + $qu);
            //#unroll i 4, q FOURS: sums.v_$i_$q += v[$i] * w_$q;
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
    var m = first_row(group.z) + local.y;
    for (; m + LATEST < end_b; m += AHEAD * ROW_THREADS) {
        let rows = load_rows(m, c);
        //#unroll t AHEAD, q FOURS: let w_$t_$q = load_u((m + $tu * ROW_THREADS) * params.r_stride + u_at + $qu);
        //#unroll t AHEAD, i 4, q FOURS: sums.v_$i_$q += rows.v_$t[$i] * w_$t_$q;
    }
    for (; m < end_b; m += ROW_THREADS) {
        let v = load_row(m, c);
        //#unroll q FOURS: let w_$q = load_u(m * params.r_stride + u_at + $qu);
        //#unroll i 4, q FOURS: sums.v_$i_$q += v[$i] * w_$q;
    }
    add_to_gradient(own, group.z, local, sums);
}

// AHEAD rows, of which none waits for another.
fn load_rows(m: u32, c: u32) -> Rows {
    var rows: Rows;
//#if x2
    if (c >= params.begin2) {
        //#unroll t AHEAD: rows.v_$t = load_x2((m + $tu * ROW_THREADS) * params.stride2 + c - params.begin2);
        return rows;
    }
//#endif
//#if x1
    if (c >= params.begin1) {
        //#unroll t AHEAD: rows.v_$t = load_x1((m + $tu * ROW_THREADS) * params.stride1 + c - params.begin1);
        return rows;
    }
//#endif
    //#unroll t AHEAD: rows.v_$t = load_own((m + $tu * ROW_THREADS) * params.x_stride + c);
    return rows;
}

fn load_row(m: u32, c: u32) -> vec4<f32> {
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
    return load_own(m * params.x_stride + c);
}

fn load_own(unit: u32) -> vec4<f32> {
//#if xa
    return load_x(unit);
//#else
    return masked4(load_x(unit), unit);
//#endif
}

struct Rows {
    //#unroll t AHEAD: v_$t: vec4<f32>,
}

struct Sums {
    //#unroll i 4, q FOURS: v_$i_$q: vec4<f32>,
}

//#if SPREAD
@group(0) @binding(3) var<storage, read_write> g: array<f32>;
//#if xa
@group(0) @binding(10) var<storage, read_write> ga: array<f32>;
//#endif
// The invocations' sums: all their v_0, then all their v_1, so that neighbours store side by side.
var<workgroup> partial: array<vec4<f32>, 4u * THREADS * ROW_THREADS>;

// Four ranks of each column at a time, for which there is memory.
fn add_to_gradient(part: Part, expert: u32, local: vec3<u32>, sums: Sums) {
    let own = local.y * THREADS + local.x;
    //#unroll q FOURS
        //#unroll i 4: partial[$iu * THREADS * ROW_THREADS + own] = sums.v_$i_$q;
        workgroupBarrier();
        add_four(part, expert, own, $qu);
        workgroupBarrier();
    //#end
}

// Each invocation adds up its share of the results, one rank of one column at a time.
fn add_four(part: Part, expert: u32, own: u32, four: u32) {
    for (var e = own; e < 16u * THREADS; e += THREADS * ROW_THREADS) {
        let i = e / (4u * THREADS);
        let x = e / 4u % THREADS;
        var sum = 0.0;
        for (var y = 0u; y < ROW_THREADS; y += 1u) {
            sum += partial[(i * ROW_THREADS + y) * THREADS + x][e % 4u];
        }
        let column = 4u * (part.c * THREADS + x) + i;
        let rank = 4u * (part.j + four) + e % 4u;
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
    if (4u * c >= part.columns) {
        return;
    }
//#if TRANSPOSED
    //#unroll q FOURS
        let first_$q = expert * params.lora_expert + 4u * (part.j + $qu) * params.g_stride + c;
        //#unroll i 4
            if (4u * (part.j + $qu) + $iu < part.ranks) {
                g[first_$q + $iu * params.g_stride] += vec4<f32>(sums.v_0_$q[$i], sums.v_1_$q[$i], sums.v_2_$q[$i], sums.v_3_$q[$i]);
            }
        //#end
    //#end
//#else
    let first = expert * params.lora_expert + 4u * c * params.g_stride + part.j;
    //#unroll q FOURS, i 4
        if (4u * c + $iu < part.columns) {
            g[first + $iu * params.g_stride + $qu] += sums.v_$i_$q;
        }
    //#end
//#endif
}
//#endif
