// lse_delta = (lse, delta), delta = do·o, per query and head: what softmax's gradient needs.
//
// o, dout (rows, heads · head_dim), lse (rows, heads) float32, lse_delta (rows, heads) of pairs,
// overwritten; one buffer, since eight are all that every adapter can bind. Heads are UNITS units
// of eight elements (HEAD_UNIT8), four (HEAD_UNIT4) or two, one after the other in a loop that no
// compiler writes out with UNIT_BY_UNIT. Launcher: kernels/attention/workgroup.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= o.rows
    heads: u32,
    stride: u32, //= o.stride
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if HEAD_UNIT8
//#input 1 o: 8
//#input 2 dout: 8
//#else
//#if HEAD_UNIT4
//#input 1 o: 4
//#input 2 dout: 4
//#else
//#input 1 o: 2
//#input 2 dout: 2
//#endif
//#endif
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> lse_delta: array<vec2<f32>>;

fn product(i: u32) -> f32 {
//#if HEAD_UNIT8
    return dot8(load_o(i), load_dout(i));
//#else
    return dot(load_o(i), load_dout(i));
//#endif
}

fn each(i: u32) {
    let row = i / params.heads;
    if (row >= params.rows) {
        return;
    }
    let base = row * params.stride + (i % params.heads) * UNITS;
    var sum = 0.0;
//#if UNIT_BY_UNIT
    for (var d = 0u; d < params.units; d++) {
        sum += product(base + d);
    }
//#else
    //#unroll d UNITS: sum += product(base + $du);
//#endif
    lse_delta[i] = vec2<f32>(lse[i], sum);
}
