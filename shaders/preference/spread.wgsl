// factors[i] = the weight of label row i: its sample's, of the answer's rows or of the prompt's, as
// its number in row_samples is even or odd; for the batch_info[0] label rows.
// Launcher: ops/preference.py.
//#include common/flat.wgsl

struct Params {
    count: u32, //= factors.columns
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> weights: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> row_samples: array<u32>;
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
@group(0) @binding(4) var<storage, read_write> factors: array<f32>;

fn each(i: u32) {
    if (i < params.count && i < batch_info[0]) {
        let number = row_samples[i];
        factors[i] = weights[number / 2u][number % 2u];
    }
}
