// Dropout without state: whether element `index` of a module's input is kept depends on the
// micro-batch's key and the module's key alone, so forward, recomputation and backward agree.
// Needs `params` with module_key, keep_below, keep_scale, and the binding `batch_info`:
// [label rows, dropout on, micro-batch key, …].

//#include common/mix_bits.wgsl

fn random_bits(index: u32) -> u32 {
    return mix_bits(mix_bits(index + batch_info[2]) ^ params.module_key);
}

// Without a branch: one invocation draws up to 32 of these, and SwiftShader's compiler had
// taken 8.8 GB for as many branches when it was ended.
fn dropout_mask(index: u32) -> f32 {
    let kept = select(0.0, params.keep_scale, random_bits(index) < params.keep_below);
    return select(kept, 1.0, batch_info[1] == 0u);
}

fn dropout_mask4(index: u32) -> vec4<f32> {
    return vec4<f32>(dropout_mask(index), dropout_mask(index + 1u), dropout_mask(index + 2u), dropout_mask(index + 3u));
}

fn dropout_mask8(index: u32) -> Eight {
    return eight(dropout_mask4(index), dropout_mask4(index + 4u));
}
