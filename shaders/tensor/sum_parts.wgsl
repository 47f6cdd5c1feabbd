// y[m, c] (+)= Σ_part x[part][m, c] + bias[c] + residual[m, c]
//
// The parts, float32 of one layout and one below the other in x, are added up in their order, into
// columns of y from unit y_unit0 on, or (ACCUMULATE) to what is there, a float32, as if that were the
// first of them. Strides count units of four.
// Launcher: kernels/common.py.
//#include common/flat.wgsl

struct Params {
    units: u32,
    parts: u32,
    columns: u32, //= x.columns
    x_stride: u32,
    y_stride: u32,
    y_unit0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 4 float32
//#if ACCUMULATE
@group(0) @binding(2) var<storage, read_write> y: array<vec4<f32>>;
//#else
//#output 2 y: 4
//#endif
//#input 3 bias?: 4 float32
//#input 4 residual?: 4

fn each(i: u32) {
    if (i < params.units) {
        let unit = i % params.x_stride;
        let at = i / params.x_stride * params.y_stride + params.y_unit0 + unit;
//#if ACCUMULATE
        var sum = y[at];
//#else
        var sum = vec4<f32>(0.0);
//#endif
        for (var part = 0u; part < params.parts; part += 1u) {
            sum += load_x(part * params.units + i);
        }
//#if bias
        let columns = 4u * vec4<u32>(unit) + vec4<u32>(0u, 1u, 2u, 3u);
        let added = load_bias(params.y_unit0 + unit);
        sum += select(vec4<f32>(0.0), added, columns < vec4<u32>(params.columns));
//#endif
//#if residual
        sum += load_residual(at);
//#endif
//#if ACCUMULATE
        y[at] = sum;
//#else
        store_y(at, sum);
//#endif
    }
}
