// du = scale · dy·b: common/lora_up_grad.wgsl. A workgroup makes 8 rows by 4 · LANES ranks for each of
// its GROUPS: every LANES-th invocation of a group shares the sums over n of four ranks. For GPUs.
//
// Of several layers of one input du has the ranks side by side, layer_r each, a multiple of eight:
// the gradients of the second and the third are dy1 and dy2, of n1 and n2 columns, and their rows of
// b begin at begin1 and begin2.
//#include common/lora_up_grad.wgsl
@group(0) @binding(3) var<storage, read_write> du: array<f32>;
//#include common/partial_sums.wgsl
//#input 1 dy: 2
//#input 5 dy1?: 2
//#input 6 dy2?: 2
//#input 2 b: 4 float32

const RANKS = 4u * LANES;
const SHARE = THREADS / (GROUPS * LANES);

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let own_first = group.y * (8u * GROUPS);
    let j0 = group.x * RANKS;
    let expert = expert_of(own_first);
    if (!is_here(expert)) {
        return;
    }
    let m0 = own_first + thread / (SHARE * LANES) * 8u;
    let lane = thread % LANES;
//#if dy1
    let layer = j0 / params.layer_r;
    let b_at = j0 % params.layer_r / 4u + lane;
    let first = of_layer(layer, 0u, params.begin1, params.begin2);
    let last = first + of_layer(layer, params.n, params.n1, params.n2) - 1u;
    let stride = of_layer(layer, params.dy_stride, params.stride1, params.stride2);
//#else
    let layer = 0u;
    let b_at = adapter_at(expert) + j0 / 4u + lane;
    let first = 0u;
    let last = params.n - 1u;
    let stride = params.dy_stride;
//#endif
    //#unroll h 2, i 4
        let dy_at_$h_$i = min(m0 + 4u * $hu + $iu, params.rows - 1u) * stride;
        var sum_$h_$i = vec4<f32>(0.0);
    //#end
    // Neighbours take neighbouring rows of b, and all of them two pairs a turn, so that more is on its
    // way: a row of dy, padded, has two halves. Rows past the last meet zeros in dy's padding.
    let half = stride / 2u;
    for (var pair = thread / LANES % SHARE; pair < half; pair += SHARE) {
        let next = half + pair;
        //#unroll e 2
            let b_0_$e = load_b(min(first + 2u * pair + $eu, last) * params.b_stride + b_at);
            let b_1_$e = load_b(min(first + 2u * next + $eu, last) * params.b_stride + b_at);
        //#end
        var pairs: Pairs;
//#if dy1
        // One branch for all rows.
        if (layer == 0u) {
            //#unroll h 2, i 4: pairs.v_$h_$i = vec4<f32>(load_dy(dy_at_$h_$i + pair), load_dy(dy_at_$h_$i + next));
        }
        if (layer == 1u) {
            //#unroll h 2, i 4: pairs.v_$h_$i = vec4<f32>(load_dy1(dy_at_$h_$i + pair), load_dy1(dy_at_$h_$i + next));
        }
//#if dy2
        if (layer == 2u) {
            //#unroll h 2, i 4: pairs.v_$h_$i = vec4<f32>(load_dy2(dy_at_$h_$i + pair), load_dy2(dy_at_$h_$i + next));
        }
//#endif
//#else
        //#unroll h 2, i 4: pairs.v_$h_$i = vec4<f32>(load_dy(dy_at_$h_$i + pair), load_dy(dy_at_$h_$i + next));
//#endif
        //#unroll h 2, i 4
            let v_$h_$i = pairs.v_$h_$i;
            sum_$h_$i += v_$h_$i.x * b_0_0;
            sum_$h_$i += v_$h_$i.y * b_0_1;
            sum_$h_$i += v_$h_$i.z * b_1_0;
            sum_$h_$i += v_$h_$i.w * b_1_1;
        //#end
    }
    // Four rows of each group at a time: sixteen sums.
    //#unroll h 2
        //#unroll i 4: put_four(thread, $iu, sum_$h_$i);
        workgroupBarrier();
        add_sixteen(thread);
        workgroupBarrier();
        if (thread < 16u * GROUPS * LANES) {
            store(own_first + thread / (4u * RANKS) * 8u + 4u * $hu, j0, thread);
        }
        workgroupBarrier();
    //#end
}

// One of the sums of a group's four rows from m0 on.
fn store(m0: u32, j0: u32, thread: u32) {
    let row = thread / RANKS % 4u;
    let rank = thread % RANKS;
    let m = m0 + row;
    let j = j0 + rank;
    if (m < params.rows && j < params.du_stride) {
        let t = total(4u * row + rank % 4u, thread / (4u * RANKS), rank / 4u);
        du[m * params.du_stride + j] = select(0.0, params.scale * t, j < params.r);
    }
}

fn of_layer(layer: u32, first: u32, second: u32, third: u32) -> u32 {
    return select(select(first, second, layer == 1u), third, layer == 2u);
}

// Two pairs of neighbours of eight rows of dy.
struct Pairs {
    //#unroll h 2, i 4: v_$h_$i: vec4<f32>,
}
