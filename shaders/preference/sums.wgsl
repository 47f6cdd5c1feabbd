// sums[s] = (Σ log p(label) over the answer's label rows, their number, Σ losses of all label rows,
// how many of the answer's labels are hits)
// of sample s; answers' rows are those whose number in row_samples is even.
//
// losses: of each label row -log p(label), and whether it is a hit. THREADS invocations share a sample.
// Launcher: ops/preference.py.
//#include common/row_reduce.wgsl

@group(0) @binding(1) var<storage, read> losses: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> samples: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> row_samples: array<u32>;
@group(0) @binding(4) var<storage, read> batch_info: array<u32>;
@group(0) @binding(5) var<storage, read_write> sums: array<vec4<f32>>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let sample = group.x * ROWS + local.y;
    // Every invocation reaches the barriers; one past the end has no rows.
    var span = vec2<u32>(0u);
    if (sample < batch_info[3]) {
        span = samples[sample].xy;
    }
    var answer = 0.0;
    var count = 0.0;
    var whole = 0.0;
    var hits = 0.0;
    for (var i = span.x + local.x; i < span.y; i += THREADS) {
        let loss = losses[i].x;
        whole += loss;
        if (row_samples[i] % 2u == 0u) {
            answer -= loss;
            count += 1.0;
            hits += losses[i].y;
        }
    }
    answer = reduce_sum(answer, local.x);
    count = reduce_sum(count, local.x);
    whole = reduce_sum(whole, local.x);
    hits = reduce_sum(hits, local.x);
    if (local.x == 0u && sample < batch_info[3]) {
        sums[sample] = vec4<f32>(answer, count, whole, hits);
    }
}
