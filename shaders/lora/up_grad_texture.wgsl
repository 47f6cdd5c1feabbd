// du = scale · dy·b: common/lora_up_grad.wgsl, for software adapters: dy and b lie in textures. Each
// invocation holds two rows of dy; eight ranks of eight rows of b are loaded by the subgroup and
// broadcast.
//#include common/lora_up_grad.wgsl
//#output 3 du: 4 float32
//#input 1 dy: 8 texture
//#input 2 b: 8 float32 texture

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let m0 = (group.x * THREADS + local.x) * 2u;
    // The workgroup's rows are in one tile; the first one's number is the same for all of them.
    let expert = expert_of(group.x * THREADS * 2u);
    if (!is_here(expert)) {
        return;
    }
    let last = params.n - 1u;
    //#unroll i 2
        let dy_at_$i = min(m0 + $iu, params.rows - 1u) * params.dy_stride;
        var sum_$i = zero8();
    //#end
    for (var n = 0u; n < params.n; n += 8u) {
        //#unroll i 2: let dy_$i = load_dy(dy_at_$i + n / 8u);
        // Rows of b past the last meet zeros in dy's padding.
        //#unroll p BLOCKS
            let row_$p = min(n + $pu * SPAN + local.x % SPAN, last);
            let b_$p = load_b(adapter_at(expert) + row_$p * params.b_stride + group.y);
        //#end
        //#unroll p BLOCKS, s SPAN
            {
                let v = broadcast_b_$s(b_$p);
                //#unroll i 2: sum_$i = add_scaled8(sum_$i, pick(dy_$i, $pu * SPAN + $su), v);
            }
        //#end
    }
    //#unroll i 2: if (m0 + $iu < params.rows) { store(m0 + $iu, 8u * group.y, sum_$i); }
}

// Element t of eight, t known when compiling.
fn pick(v: Eight, t: u32) -> f32 {
    return select(v.even[t / 2u], v.odd[t / 2u], t % 2u == 1u);
}

fn store(m: u32, j: u32, v: Eight) {
    let at = (m * params.du_stride + j) / 4u;
    let ranks = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u);
    let end = vec4<u32>(params.r);
    store_du(at, select(vec4<f32>(0.0), params.scale * low(v), ranks < end));
    store_du(at + 1u, select(vec4<f32>(0.0), params.scale * high(v), ranks + vec4<u32>(4u) < end));
}
