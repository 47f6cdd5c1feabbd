// What attention's backward kernels share that work on matrix units.
//
// In f16, what is large and what is small must be put between its ends: gradients of o are
// multiplied by a power of two (x_scale) that puts the largest just below 2¹⁵, and weights' gradients
// by another, for which ds < 2 · HEAD · 2¹⁵ · the largest value is a bound.
//#include common/attention_tile_gradient.wgsl
//#include common/attention_masks.wgsl
//#if HALF
//#include common/attention_sizes.wgsl

// f16 holds weights, which are below 1, as 2^WEIGHT_BITS times as much: drivers may take what is below
// 6e-5 for zero.
const WEIGHT_BITS = 14.0;
const WEIGHT_SCALE = 16384.0;
//#else

const WEIGHT_BITS = 0.0;
const WEIGHT_SCALE = 1.0;
//#endif

var<private> x_scale: f32 = 1.0;
var<private> x_inverse: f32 = 1.0;
var<private> ds_scale: f32 = 1.0; // of products with weights that are WEIGHT_SCALE times as much
var<private> ds_inverse: f32 = 1.0;
//#if HALF

// Exponents are as float32 has them, 127 more; factors and their inverses stay normal.
fn take_scales(dout: f32, value: f32) {
    let x_exponent = exponent_of_scale(dout);
    x_scale = power(x_exponent);
    x_inverse = power(254u - x_exponent);
    // Values are held at 65,504 < 2¹⁶. 2^HEAD_BITS >= HEAD.
    let value_exponent = min(i32(bitcast<u32>(value) >> 23u) + 1, 127 + 16);
    let ds_exponent = u32(clamp(127 + 15 - 1 - i32(HEAD_BITS) - 15 - (value_exponent - 127), 1 + i32(WEIGHT_BITS), 253));
    ds_scale = power(ds_exponent - u32(WEIGHT_BITS));
    ds_inverse = power(254u - ds_exponent);
}
//#endif

// Of a row's log-sum-exp and its delta, what weights are made of: to which power of two a score of 0
// raises, and what is taken off do·v.
fn power_of(lse: vec4<f32>) -> vec4<f32> {
    return WEIGHT_BITS - LOG2_E * lse;
}

fn taken_of(delta: vec4<f32>) -> vec4<f32> {
    return -(delta * x_scale * ds_scale);
}

struct Powers {
    powers: vec4<f32>,
    slopes: vec4<f32>,
}

fn powers_of(products: vec4<f32>, at_0: vec4<f32>) -> Powers {
//#if SOFTCAP
    //#unroll i 4: let score_$i = score(products[$i] * params.scale);
    let s = vec4<f32>(score_0.value, score_1.value, score_2.value, score_3.value);
    return Powers(s * LOG2_E + at_0, vec4<f32>(score_0.slope, score_1.slope, score_2.slope, score_3.slope));
//#else
    return Powers(products * (params.scale * LOG2_E) + at_0, vec4<f32>(1.0));
//#endif
}

fn weights_of_powers(p: vec4<f32>, slopes: vec4<f32>, dp: vec4<f32>, taken: vec4<f32>) -> Weights {
    return Weights(p, p * (dp * ds_scale + taken) * slopes);
}

// As weights_of, but WEIGHT_SCALE times p, and ds as it goes into f16: of a whole turn.
fn whole_weights(products: vec4<f32>, dp: vec4<f32>, at_0: vec4<f32>, taken: vec4<f32>) -> Weights {
//#if HALF
    let made = powers_of(products, at_0);
    return weights_of_powers(exp2(min(made.powers, vec4<f32>(WEIGHT_BITS))), made.slopes, dp, taken);
//#else
    return seen_weights(products, dp, at_0, taken, vec4<bool>(true)); // sizes are not looked at
//#endif
}

// The same of any.
fn seen_weights(products: vec4<f32>, dp: vec4<f32>, at_0: vec4<f32>, taken: vec4<f32>, seen: vec4<bool>) -> Weights {
    let made = powers_of(products, at_0);
    let above = made.powers - vec4<f32>(WEIGHT_BITS);
    let is_above = bitcast<vec4<u32>>(above) - vec4<u32>(1u) < vec4<u32>(0x7f800000u); // as not_above_zero
    let p = exp2(select(made.powers, vec4<f32>(WEIGHT_BITS), is_above));
    return weights_of_powers(select(vec4<f32>(0.0), p, seen), made.slopes, dp, taken);
}
