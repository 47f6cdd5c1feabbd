// Elements of an operand x, one at a time, and pairs of an operand y: bindings X_BINDING, Y_BINDING.
//#if BF16
//#include common/bfloat16.wgsl
@group(0) @binding(X_BINDING) var<storage, read> x: array<u32>;
@group(0) @binding(Y_BINDING) var<storage, read_write> y: array<u32>;

fn load_x(element: u32) -> f32 {
    let word = x[element / 2u];
    return bitcast<f32>(select(word & 0xffff0000u, word << 16u, element % 2u == 0u));
}

fn store_y(pair: u32, v: vec2<f32>) {
    y[pair] = pack_bf16(vec4<f32>(v, 0.0, 0.0)).x;
}
//#else
@group(0) @binding(X_BINDING) var<storage, read> x: array<f32>;
@group(0) @binding(Y_BINDING) var<storage, read_write> y: array<vec2<f32>>;

fn load_x(element: u32) -> f32 {
    return x[element];
}

fn store_y(pair: u32, v: vec2<f32>) {
    y[pair] = v;
}
//#endif
