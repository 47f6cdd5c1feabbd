// stats[0] += Σ losses.x,  stats[1] += their number,  stats[4] += Σ losses.y, over the micro-batch's batch_info[0] label rows.
//
// One workgroup of THREADS invocations. Launcher: ops/loss.py.
//#include common/row_reduce.wgsl

@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> batch_info: array<u32>;
@group(0) @binding(3) var<storage, read_write> stats: array<f32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_id) local: vec3<u32>) {
    var sum = vec2<f32>(0.0);
    for (var i = local.x; i < batch_info[0]; i += THREADS) {
        sum += losses[i];
    }
    let total = reduce_sum(sum.x, local.x);
    let hits = reduce_sum(sum.y, local.x);
    if (local.x == 0u) {
        stats[0] += total;
        stats[1] += f32(batch_info[0]);
        stats[4] += hits;
    }
}
