// u = scale · mask(x)·aᵀ: common/lora_down.wgsl. A workgroup makes 4 rows by 8 ranks for each of its
// GROUPS, whose invocations share the sum over k; those of the same rows lie side by side. For GPUs.
//#include common/lora_down.wgsl
@group(0) @binding(3) var<storage, read_write> u: array<f32>;
//#include common/masked4.wgsl
//#include common/partial_sums.wgsl
//#input 1 x: 4
//#input 2 a: 4 float32

const SHARE = THREADS / GROUPS;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let first = group.y * (4u * GROUPS);
    let j0 = group.x * 8u;
    let expert = expert_of(first);
    if (!is_here(expert)) {
        return;
    }
    let m0 = first + thread / SHARE * 4u;
    //#unroll h 2, i 2: let x_at_$h_$i = min(m0 + 2u * $hu + $iu, params.rows - 1u) * params.x_stride;
    //#unroll j 8: let a_at_$j = min(j0 + $ju, params.r - 1u) * params.a_stride + adapter_at(expert);
    //#unroll h 2, i 2, j 8: var sum_$h_$i_$j = 0.0;
    // Neighbours take neighbouring units of 16 bytes of a.
    for (var k = thread % SHARE; k < params.x_stride; k += SHARE) {
        //#unroll h 2, i 2: let x_$h_$i = masked4(load_x(x_at_$h_$i + k), x_at_$h_$i + k);
        // Term by term: each is one instruction with its sum, which those of a dot product are not.
        //#unroll j 8
            let a_$j = load_a(a_at_$j + k);
            //#unroll t 4, h 2, i 2: sum_$h_$i_$j += x_$h_$i[$t] * a_$j[$t];
        //#end
    }
    // Two rows of each group at a time: sixteen sums.
    //#unroll h 2
        //#unroll i 2
            put_four(thread, 2u * $iu, vec4<f32>(sum_$h_$i_0, sum_$h_$i_1, sum_$h_$i_2, sum_$h_$i_3));
            put_four(thread, 2u * $iu + 1u, vec4<f32>(sum_$h_$i_4, sum_$h_$i_5, sum_$h_$i_6, sum_$h_$i_7));
        //#end
        workgroupBarrier();
        add_sixteen(thread);
        workgroupBarrier();
        if (thread < 16u * GROUPS) {
            store(first + thread / 16u * 4u + 2u * $hu, j0, thread);
        }
        workgroupBarrier();
    //#end
}

// One of the sums of a group's two rows from m0 on.
fn store(m0: u32, j0: u32, thread: u32) {
    let sum = thread % 16u;
    let m = m0 + sum / 8u;
    let j = j0 + sum % 8u;
    if (m < params.rows && j < params.u_stride) {
        let t = total(sum, thread / 16u, 0u);
        u[m * params.u_stride + j] = select(0.0, params.scale * t, j < params.r);
    }
}
