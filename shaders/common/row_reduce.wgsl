// Sum and maximum over the THREADS invocations that share a row: a subgroup's on software adapters
// (SUBGROUP), none are exchanged with one invocation a row (ONE_THREAD).
//#if SUBGROUP
fn reduce_sum(value: f32, thread: u32) -> f32 {
    return subgroupAdd(value);
}

fn reduce_max(value: f32, thread: u32) -> f32 {
    return subgroupMax(value);
}
//#else
//#if ONE_THREAD
fn reduce_sum(value: f32, thread: u32) -> f32 {
    return value;
}

fn reduce_max(value: f32, thread: u32) -> f32 {
    return value;
}
//#else
var<workgroup> partial: array<f32, THREADS>;

fn reduce_sum(value: f32, thread: u32) -> f32 {
    partial[thread] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half = half / 2u) {
        if (thread < half) {
            partial[thread] += partial[thread + half];
        }
        workgroupBarrier();
    }
    let total = partial[0];
    workgroupBarrier();
    return total;
}

fn reduce_max(value: f32, thread: u32) -> f32 {
    partial[thread] = value;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half = half / 2u) {
        if (thread < half) {
            partial[thread] = max(partial[thread], partial[thread + half]);
        }
        workgroupBarrier();
    }
    let largest = partial[0];
    workgroupBarrier();
    return largest;
}
//#endif
//#endif
