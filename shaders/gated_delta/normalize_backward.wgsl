// dx = s · (g - x · (s / c)² · (x · g)),  s = c / √(Σx² + ε),  g = Σ dx̂ of a key head's value heads, for
// x = q, c = 1 / √key_dim and x = k, c = 1.
//
// q, k, dq, dk (rows, key heads · key_dim): dq and dk overwritten, from first_head / group on; tokens and
// dkeys as in gated_delta/query_gradient.wgsl. One invocation takes a head of q or k.
// Launcher: kernels/gated_delta.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= q.rows
    heads: u32,
    first_head: u32,
    group: u32,
    key_units: u32,
    key_stride: u32, //= q.stride
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> tokens: array<vec4<f32>>;
//#input 2 q: 4
//#input 3 k: 4
@group(0) @binding(4) var<storage, read> dkeys: array<vec4<f32>>;
//#output 5 dq: 4
//#output 6 dk: 4

fn given(row: u32, head: u32, part: u32, unit: u32) -> vec4<f32> {
    var sum = vec4<f32>(0.0);
    for (var h = head * params.group; h < (head + 1u) * params.group; h += 1u) {
        sum += dkeys[(2u * (row * params.heads + h) + part) * params.key_units + unit];
    }
    return sum;
}

fn each(i: u32) {
    let heads = params.heads / params.group;
    let head = i / 2u % heads;
    let row = i / 2u / heads;
    if (row >= params.rows) {
        return;
    }
    let at = row * params.key_stride + (params.first_head / params.group + head) * params.key_units;
    let token = tokens[2u * (row * params.heads + head * params.group)];
    let part = i % 2u;
    var product = 0.0;
    if (part == 0u) {
        for (var d = 0u; d < params.key_units; d += 1u) {
            product += dot(load_q(at + d), given(row, head, 0u, d));
        }
        let factor = token.x * token.x * f32(4u * params.key_units) * product;
        for (var d = 0u; d < params.key_units; d += 1u) {
            store_dq(at + d, token.x * (given(row, head, 0u, d) - factor * load_q(at + d)));
        }
    } else {
        for (var d = 0u; d < params.key_units; d += 1u) {
            product += dot(load_k(at + d), given(row, head, 1u, d));
        }
        let factor = token.y * token.y * product;
        for (var d = 0u; d < params.key_units; d += 1u) {
            store_dk(at + d, token.y * (given(row, head, 1u, d) - factor * load_k(at + d)));
        }
    }
}
