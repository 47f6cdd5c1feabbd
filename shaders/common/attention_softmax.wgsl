// Scores four at a time, as attention's forward kernels with workgroup memory take them.
// Drivers make exp of a power of two, and those that compile with fast math take it that no number
// ends beyond float32: both of these, and their difference, times log₂ e do not.
const HIDDEN = -2.0e38;  // a score that is not seen
const LEAST = -1.0e38;  // below all scores but that: exp(HIDDEN - LEAST) = 0

// product = q·k.
fn scores_of(product: vec4<f32>) -> vec4<f32> {
    let s = product * params.scale;
//#if SOFTCAP
    return vec4<f32>(score(s.x).value, score(s.y).value, score(s.z).value, score(s.w).value);
//#else
    return s;
//#endif
}
