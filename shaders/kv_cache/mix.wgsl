// o[head] = Σ_key p[head, key] · v[key] over the keys up to past = batch_info[3].
//
// p (heads, capacity) float32, v (capacity, kv_heads · head_dim), o (1, heads · head_dim); o is
// overwritten, its padding with zeros. An invocation per unit of o. Launcher: ops/cached_attention.py.
//#include common/flat.wgsl
//#include common/head_value.wgsl

struct Params {
    heads: u32,
    group: u32,
    kv_stride: u32,
    stride: u32,
    units: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> p: array<f32>;
//#if HEAD_UNIT4
//#input 2 v: 4
//#output 4 o: 4
//#else
//#input 2 v: 2
//#output 4 o: 2
//#endif
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;

fn each(i: u32) {
    if (i >= params.units) {
        return;
    }
    let head = i / UNITS;
    if (head >= params.heads) {
        store_o(i, HeadValue(0.0));
        return;
    }
    let v_at = head / params.group * UNITS + i % UNITS;
    var sum = HeadValue(0.0);
    for (var key = 0u; key <= batch_info[3]; key += 1u) {
        sum += p[head * params.stride + key] * load_v(v_at + key * params.kv_stride);
    }
    store_o(i, sum);
}
