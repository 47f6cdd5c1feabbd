// u = scale · mask(x)·aᵀ: common/lora_down.wgsl, for software adapters: x and a lie in textures. Each
// invocation holds four rows of x; the ranks of a (BLOCKS · SPAN of them) are loaded one by each
// invocation of the subgroup and broadcast.
//#include common/lora_down.wgsl
//#input 1 x: 8 texture
//#input 2 a: 8 float32 texture

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let m0 = (group.x * THREADS + local.x) * 4u;
    let j0 = group.y * (BLOCKS * SPAN);
    // The workgroup's rows are in one tile; the first one's number is the same for all of them.
    let expert = expert_of(group.x * THREADS * 4u);
    if (!is_here(expert)) {
        return;
    }
    //#unroll i 4: let x_at_$i = min(m0 + $iu, params.rows - 1u) * params.x_stride;
    //#unroll p BLOCKS
        let a_at_$p = min(j0 + $pu * SPAN + local.x % SPAN, params.r - 1u) * params.a_stride + adapter_at(expert);
    //#end
    //#unroll p BLOCKS, s SPAN: var acc_$p_$s = vec4<f32>(0.0);
    for (var k = 0u; k < params.x_stride; k += 1u) {
        //#unroll i 4: let x_$i = masked(load_x(x_at_$i + k), x_at_$i + k);
        //#unroll p BLOCKS: let a_$p = load_a(a_at_$p + k);
        //#unroll p BLOCKS, s SPAN
            let v_$p_$s = broadcast_a_$s(a_$p);
            acc_$p_$s += vec4<f32>(dot8(v_$p_$s, x_0), dot8(v_$p_$s, x_1), dot8(v_$p_$s, x_2), dot8(v_$p_$s, x_3));
        //#end
    }
    // acc_p_s: four rows of rank j0 + p · SPAN + s. Padding ranks become zero.
    //#unroll p BLOCKS, s SPAN: store(m0, j0 + $pu * SPAN + $su, acc_$p_$s * params.scale);
}

fn store(m: u32, j: u32, value: vec4<f32>) {
    if (j < params.u_stride) {
        let v = select(vec4<f32>(0.0), value, j < params.r);
        let at = m * params.u_stride + j;
        //#unroll i 4: if (m + $iu < params.rows) { u[at + $iu * params.u_stride] = v[$i]; }
    }
}
