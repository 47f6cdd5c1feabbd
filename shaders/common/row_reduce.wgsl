// Sum and maximum over the THREADS invocations that share a row: a subgroup's on software adapters
// (SUBGROUP), none are exchanged with one invocation a row (ONE_THREAD). Else, of a power of two,
// an eighth of the invocations combines eight values each until all look at the up to eight left.
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

// How many values are left for all to look at. Conditions on constants cost nothing here and below.
fn left() -> u32 {
    if (THREADS > 512u) {
        return THREADS / 512u;
    }
    if (THREADS > 64u) {
        return THREADS / 64u;
    }
    if (THREADS > 8u) {
        return THREADS / 8u;
    }
    return THREADS;
}

fn add_eights(thread: u32, count: u32) {
    if (thread < count) {
        //#unroll i 8: let v_$i = partial[thread + $iu * count];
        partial[thread] = ((v_0 + v_1) + (v_2 + v_3)) + ((v_4 + v_5) + (v_6 + v_7));
    }
    workgroupBarrier();
}

fn reduce_sum(value: f32, thread: u32) -> f32 {
    partial[thread] = value;
    workgroupBarrier();
    //#unroll i 3: if (THREADS > (8u << (3u * $iu))) { add_eights(thread, THREADS >> (3u * $iu + 3u)); }
    var total = partial[0];
    //#unroll i 7: if (left() > $iu + 1u) { total += partial[min($iu + 1u, THREADS - 1u)]; }
    workgroupBarrier();
    return total;
}

fn largest_of_eights(thread: u32, count: u32) {
    if (thread < count) {
        //#unroll i 8: let v_$i = partial[thread + $iu * count];
        partial[thread] = max(max(max(v_0, v_1), max(v_2, v_3)), max(max(v_4, v_5), max(v_6, v_7)));
    }
    workgroupBarrier();
}

fn reduce_max(value: f32, thread: u32) -> f32 {
    partial[thread] = value;
    workgroupBarrier();
    //#unroll i 3: if (THREADS > (8u << (3u * $iu))) { largest_of_eights(thread, THREADS >> (3u * $iu + 3u)); }
    var largest = partial[0];
    //#unroll i 7: if (left() > $iu + 1u) { largest = max(largest, partial[min($iu + 1u, THREADS - 1u)]); }
    workgroupBarrier();
    return largest;
}
//#endif
//#endif
