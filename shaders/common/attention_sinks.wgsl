// Where the sum of a softmax begins: with nothing, or with the head's sink, a logit of its own that
// takes its share of the attention and has no value (Xiao et al., 2023; gpt-oss). The log-sum-exp
// that is stored contains it, so that the backward needs to know nothing of sinks.
//#if sinks
@group(0) @binding(7) var<storage, read> sinks: array<f32>;

const FIRST_SUM = 1.0;

fn first_highest(head: u32, nothing: f32) -> f32 {
    return sinks[head];
}
//#else
const FIRST_SUM = 0.0;

fn first_highest(head: u32, nothing: f32) -> f32 {
    return nothing;
}
//#endif
