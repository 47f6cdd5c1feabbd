// du = scale · dy·b: common/lora_up_grad.wgsl. A workgroup makes 4 rows by 8 ranks, its THREADS
// invocations sharing the sum over n: for GPUs.
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
//#input 2 b: 8 float32

const SUMS = 32u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m0 = group.x * 4u;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
//#if dy1
    let layer = 8u * group.y / params.layer_r;
    let b_at = group.y % (params.layer_r / 8u);
    let first = of_layer(layer, 0u, params.begin1, params.begin2);
    let last = first + of_layer(layer, params.n, params.n1, params.n2) - 1u;
    let stride = of_layer(layer, params.dy_stride, params.stride1, params.stride2);
//#else
    let layer = 0u;
    let b_at = adapter_at(expert) + group.y;
    let first = 0u;
    let last = params.n - 1u;
    let stride = params.dy_stride;
//#endif
    //#unroll i 4
        let dy_at_$i = min(m0 + $iu, params.rows - 1u) * stride;
        var sum_$i = zero8();
    //#end
    // Neighbours take neighbouring rows of b. Rows past the last meet zeros in dy's padding.
    for (var pair = thread; pair < stride; pair += THREADS) {
        let even = load_b(min(first + 2u * pair, last) * params.b_stride + b_at);
        let odd = load_b(min(first + 2u * pair + 1u, last) * params.b_stride + b_at);
        var pairs: Pairs;
//#if dy1
        // One branch for all four.
        if (layer == 0u) {
            //#unroll i 4: pairs.v_$i = load_dy(dy_at_$i + pair);
        }
        if (layer == 1u) {
            //#unroll i 4: pairs.v_$i = load_dy1(dy_at_$i + pair);
        }
//#if dy2
        if (layer == 2u) {
            //#unroll i 4: pairs.v_$i = load_dy2(dy_at_$i + pair);
        }
//#endif
//#else
        //#unroll i 4: pairs.v_$i = load_dy(dy_at_$i + pair);
//#endif
        //#unroll i 4: sum_$i = add_scaled8(add_scaled8(sum_$i, pairs.v_$i.x, even), pairs.v_$i.y, odd);
    }
    //#unroll i 4, j 4
        put_partial(thread, $iu * 8u + 2u * $ju, sum_$i.even[$ju]);
        put_partial(thread, $iu * 8u + 2u * $ju + 1u, sum_$i.odd[$ju]);
    //#end
    workgroupBarrier();
    for (var i = thread; i < SUMS; i += THREADS) {
        let m = m0 + i / 8u;
        let j = group.y * 8u + i % 8u;
        if (m < params.rows && j < params.du_stride) {
            du[m * params.du_stride + j] = select(0.0, params.scale * total(i), j < params.r);
        }
    }
}

fn of_layer(layer: u32, first: u32, second: u32, third: u32) -> u32 {
    return select(select(first, second, layer == 1u), third, layer == 2u);
}

// Two neighbours of four rows of dy.
struct Pairs {
    v_0: vec2<f32>,
    v_1: vec2<f32>,
    v_2: vec2<f32>,
    v_3: vec2<f32>,
}
