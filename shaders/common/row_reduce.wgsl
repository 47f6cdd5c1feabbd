// Sum and maximum over the LANES invocations that share a row: a subgroup's on software adapters
// (SUBGROUP), none are exchanged with one lane a row.
//#if SUBGROUP
fn reduce_sum(value: f32, lane: u32) -> f32 {
    return subgroupAdd(value);
}

fn reduce_max(value: f32, lane: u32) -> f32 {
    return subgroupMax(value);
}
//#else
//#if ONE_LANE
fn reduce_sum(value: f32, lane: u32) -> f32 {
    return value;
}

fn reduce_max(value: f32, lane: u32) -> f32 {
    return value;
}
//#else
var<workgroup> lanes: array<f32, LANES>;

fn reduce_sum(value: f32, lane: u32) -> f32 {
    lanes[lane] = value;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half = half / 2u) {
        if (lane < half) {
            lanes[lane] += lanes[lane + half];
        }
        workgroupBarrier();
    }
    let total = lanes[0];
    workgroupBarrier();
    return total;
}

fn reduce_max(value: f32, lane: u32) -> f32 {
    lanes[lane] = value;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half = half / 2u) {
        if (lane < half) {
            lanes[lane] = max(lanes[lane], lanes[lane + half]);
        }
        workgroupBarrier();
    }
    let largest = lanes[0];
    workgroupBarrier();
    return largest;
}
//#endif
//#endif
