// du = scale · dy·b: common/lora_up_grad.wgsl. A workgroup makes 4 rows by 8 ranks, its THREADS
// invocations sharing the sum over n: for GPUs.
//#include common/lora_up_grad.wgsl
//#include common/partial_sums.wgsl
//#input 1 dy: 2
//#input 2 b: 8 float32

const SUMS = 32u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m0 = group.x * 4u;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    let b_at = adapter_at(expert) + group.y;
    //#unroll i 4
        let dy_at_$i = min(m0 + $iu, params.rows - 1u) * params.dy_stride;
        var sum_$i = zero8();
    //#end
    let last = params.n - 1u;
    // Neighbours take neighbouring rows of b. Rows past the last meet zeros in dy's padding.
    for (var pair = thread; pair < params.dy_stride; pair += THREADS) {
        let even = load_b(min(2u * pair, last) * params.b_stride + b_at);
        let odd = load_b(min(2u * pair + 1u, last) * params.b_stride + b_at);
        //#unroll i 4
            let dy_$i = load_dy(dy_at_$i + pair);
            sum_$i = add_scaled8(add_scaled8(sum_$i, dy_$i.x, even), dy_$i.y, odd);
        //#end
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
            du[m * params.du_stride + params.du_first + j] = select(0.0, params.scale * total(i), j < params.r);
        }
    }
}
