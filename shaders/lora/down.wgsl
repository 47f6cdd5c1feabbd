// u = scale · mask(x)·aᵀ: common/lora_down.wgsl. A workgroup makes 4 rows by 8 ranks, its THREADS
// invocations sharing the sum over k: for GPUs.
//#include common/lora_down.wgsl
@group(0) @binding(3) var<storage, read_write> u: array<f32>;
//#include common/partial_sums.wgsl
//#input 1 x: 8
//#input 2 a: 8 float32

const SUMS = 32u;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m0 = group.x * 4u;
    let j0 = group.y * 8u;
    let expert = expert_of(m0);
    if (!is_here(expert)) {
        return;
    }
    //#unroll i 4: let x_at_$i = min(m0 + $iu, params.rows - 1u) * params.x_stride;
    //#unroll j 8: let a_at_$j = min(j0 + $ju, params.r - 1u) * params.a_stride + adapter_at(expert);
    //#unroll i 4, j 8: var sum_$i_$j = 0.0;
    for (var k = thread; k < params.x_stride; k += THREADS) {
        //#unroll i 4: let x_$i = masked(load_x(x_at_$i + k), x_at_$i + k);
        // Term by term: each is one instruction with its sum, which those of a dot product are not.
        //#unroll j 8
            let a_$j = load_a(a_at_$j + k);
            //#unroll t 4, i 4: sum_$i_$j += x_$i.even[$t] * a_$j.even[$t]; sum_$i_$j += x_$i.odd[$t] * a_$j.odd[$t];
        //#end
    }
    //#unroll i 4, j 8: put_partial(thread, $iu * 8u + $ju, sum_$i_$j);
    workgroupBarrier();
    for (var i = thread; i < SUMS; i += THREADS) {
        let m = m0 + i / 8u;
        let j = j0 + i % 8u;
        if (m < params.rows && j < params.u_stride) {
            u[m * params.u_stride + j] = select(0.0, params.scale * total(i), j < params.r);
        }
    }
}
