// What attention's backward kernels share that work on tiles.
//#include common/attention_gradient.wgsl

// Of four queries with a key, or of a query with four keys.
struct Weights {
    p: vec4<f32>,
    ds: vec4<f32>,
}

// As weight_of: products = q·k, dp = do·v.
fn weights_of(products: vec4<f32>, dp: vec4<f32>, lse: vec4<f32>, delta: vec4<f32>, seen: vec4<bool>) -> Weights {
    let s = products * params.scale;
    //#unroll i 4: let weight_$i = weight_of(s[$i], dp[$i], vec2<f32>(lse[$i], delta[$i]), seen[$i]);
    return Weights(
        vec4<f32>(weight_0.p, weight_1.p, weight_2.p, weight_3.p),
        vec4<f32>(weight_0.ds, weight_1.ds, weight_2.ds, weight_3.ds),
    );
}

// lse_delta of four queries from one on; those past the last repeat it.
struct Pairs {
    lse: vec4<f32>,
    delta: vec4<f32>,
}

fn pairs_of(row0: u32, query: u32, head: u32) -> Pairs {
    //#unroll i 4: let pair_$i = lse_delta[(row0 + min(query + $iu, params.seq - 1u)) * params.heads + head];
    return Pairs(
        vec4<f32>(pair_0.x, pair_1.x, pair_2.x, pair_3.x),
        vec4<f32>(pair_0.y, pair_1.y, pair_2.y, pair_3.y),
    );
}
