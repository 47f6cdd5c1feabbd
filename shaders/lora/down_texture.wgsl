// u = scale · mask(x)·aᵀ: common/lora_down.wgsl, for software adapters: x and a lie in textures. Each
// invocation holds four rows of x; the ranks of a (BLOCKS · SPAN of them) are loaded one by each
// invocation of the subgroup and broadcast.
//#include common/lora_down.wgsl
//#output 3 u: 4 float32
//#input 1 x: 8 texture
//#input 2 a: 8 float32 texture

// What the forward keeps of a unit of x.
fn masked(v: Eight, unit: u32) -> Eight {
//#if DROPOUT
    return multiply8(v, dropout_mask8(8u * unit));
//#else
    return v;
//#endif
}

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
    var of_rank: array<vec4<f32>, 4u * FOURS>;
    //#unroll p BLOCKS, s SPAN: of_rank[$pu * SPAN + $su] = acc_$p_$s * params.scale;
    //#unroll q FOURS, i 4
        store(m0 + $iu, j0 + 4u * $qu, vec4<f32>(of_rank[4u * $qu][$i], of_rank[4u * $qu + 1u][$i], of_rank[4u * $qu + 2u][$i], of_rank[4u * $qu + 3u][$i]));
    //#end
}

fn store(m: u32, j: u32, value: vec4<f32>) {
    let ranks = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u);
    if (j < params.u_stride && m < params.rows) {
        store_u((m * params.u_stride + j) / 4u, select(vec4<f32>(0.0), value, ranks < vec4<u32>(params.r)));
    }
}
