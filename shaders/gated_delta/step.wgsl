// The gated delta rule for a new token of each text: S = exp(decay) · S + k̂ ⊗ w,  o = Sᵀ · q̂,  where
// w = beta · (v - exp(decay) · Sᵀ · k̂).
//
// q, k (rows, key heads · key_dim), v, o (rows, value heads · value_dim), decay, beta (rows, value heads)
// float32, state[places] (value heads · key_dim, value_dim) float32; o and state are overwritten. A workgroup takes LANES
// units of a head's columns, PARTS invocations share a column's rows. Launcher: kernels/gated_delta.py.

struct Params {
    group: u32,
    key_units: u32,
    value_units: u32,
    heads: u32,
    key_stride: u32, //= q.stride
    gate_stride: u32, //= beta.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 q: 4 buffer
//#input 2 k: 4 buffer
//#input 3 v: 4 buffer
@group(0) @binding(4) var<storage, read> decay: array<f32>;
@group(0) @binding(5) var<storage, read> beta: array<f32>;
@group(0) @binding(6) var<storage, read_write> state: array<vec4<f32>>;
//#output 7 o: 4
@group(0) @binding(8) var<storage, read> places: array<u32>;

const EPS = 1.0e-6;

var<workgroup> told: array<vec4<f32>, THREADS>;
var<workgroup> asked: array<vec4<f32>, THREADS>;
var<workgroup> squares: array<vec4<f32>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = index % LANES;
    let part = index / LANES;
    let column = group.x * LANES + lane;
    let unit = min(column, params.value_units - 1u);
    let key_at = group.z * params.key_stride + group.y / params.group * params.key_units;
    let gate_at = group.z * params.gate_stride + group.y;
    let state_at = (places[group.z] * params.heads + group.y) * 4u * params.key_units * params.value_units + unit;
    var of_key = vec4<f32>(0.0);
    var of_query = vec4<f32>(0.0);
    var products = vec4<f32>(0.0);
    for (var d = part; d < params.key_units; d += PARTS) {
        let q = load_q(key_at + d);
        let k = load_k(key_at + d);
        products += vec4<f32>(dot(q, q), dot(k, k), dot(q, k), 0.0);
        let at = state_at + 4u * d * params.value_units;
        let rows = mat4x4<f32>(state[at], state[at + params.value_units], state[at + 2u * params.value_units], state[at + 3u * params.value_units]);
        of_key += rows * k;
        of_query += rows * q;
    }
    told[index] = of_key;
    asked[index] = of_query;
    squares[index] = products;
    workgroupBarrier();
    of_key = vec4<f32>(0.0);
    of_query = vec4<f32>(0.0);
    products = vec4<f32>(0.0);
    for (var p = 0u; p < PARTS; p += 1u) {
        of_key += told[p * LANES + lane];
        of_query += asked[p * LANES + lane];
        products += squares[p * LANES + lane];
    }
    let q_scale = inverseSqrt(products.x + EPS) * inverseSqrt(f32(4u * params.key_units));
    let k_scale = inverseSqrt(products.y + EPS);
    let keep = exp(max(decay[gate_at], -200.0));
    let value_at = (group.z * params.heads + group.y) * params.value_units + unit;
    let written = beta[gate_at] * (load_v(value_at) - keep * k_scale * of_key);
    if (column < params.value_units) {
        for (var d = part; d < params.key_units; d += PARTS) {
            let key = k_scale * load_k(key_at + d);
            let at = state_at + 4u * d * params.value_units;
            //#unroll c 4: state[at + $cu * params.value_units] = keep * state[at + $cu * params.value_units] + key[$c] * written;
        }
        if (part == 0u) {
            store_o(value_at, q_scale * (keep * of_query + k_scale * products.z * written));
        }
    }
}
