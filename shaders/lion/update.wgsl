// Lion (Chen et al., 2023) over the flat adapter, with g = stats[3] · gradient:
//
// p = p · (1 - lr·weight_decay) - lr · sign(β₁m + (1 - β₁)g),  m = β₂m + (1 - β₂)g
//
// Nothing but the gradient changes where stats[3] is 0. The gradient is zeroed for the next step.
// step_info[0] is the lr of A, step_info[3] that of B, whose elements begin with unit split (LoRA+).
// With GRADIENT_HALVES the gradient is bfloat16. Launcher: ops/optimizers.py.
//#include common/flat.wgsl
//#if GRADIENT_HALVES
//#include common/bfloat16.wgsl
//#endif

struct Params {
    units: u32, //= m.units
    beta1: f32,
    beta2: f32,
    weight_decay: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    split: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> step_info: array<f32>;
@group(0) @binding(2) var<storage, read> stats: array<f32>;
@group(0) @binding(3) var<storage, read_write> p: array<vec4<f32>>;
//#if GRADIENT_HALVES
@group(0) @binding(4) var<storage, read_write> gradient: array<vec2<u32>>;
//#else
@group(0) @binding(4) var<storage, read_write> gradient: array<vec4<f32>>;
//#endif
@group(0) @binding(5) var<storage, read_write> m: array<vec4<f32>>;

fn gradient_at(i: u32) -> vec4<f32> {
//#if GRADIENT_HALVES
    return unpack_bf16(gradient[i]);
//#else
    return gradient[i];
//#endif
}

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    let factor = stats[3];
    if (factor != 0.0) {
        let g = gradient_at(i) * factor;
        let lr = select(step_info[3], step_info[0], i < params.split);
        let direction = sign(params.beta1 * m[i] + params.one_minus_beta1 * g);
        p[i] = p[i] * (1.0 - lr * params.weight_decay) - lr * direction;
        m[i] = params.beta2 * m[i] + params.one_minus_beta2 * g;
    }
//#if GRADIENT_HALVES
    gradient[i] = vec2<u32>(0u);
//#else
    gradient[i] = vec4<f32>(0.0);
//#endif
}
