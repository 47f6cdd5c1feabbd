// Mamba 2's scan for a new token of each sequence: S = exp(dt · A) · S + B ⊗ dt · x,  y = Sᵀ·C + D · x.
//
// bc (rows, 2 · groups · state_size) is B of all groups, then C; x, y (rows, heads · head_dim), dt (rows, heads), a_log, d (heads), state[places]
// (heads · state_size, head_dim) float32, A = -exp(a_log); y and state are overwritten. A workgroup takes LANES
// units of a head's columns, PARTS invocations share a column's rows. Launcher: kernels/mamba_scan.py.

struct Params {
    group: u32,
    state_units: u32,
    c_at: u32,
    head_units: u32,
    heads: u32,
    state_stride: u32, //= bc.stride
    dt_stride: u32, //= dt.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 bc: 4 buffer
//#input 3 x: 4 buffer
@group(0) @binding(4) var<storage, read> dt: array<f32>;
@group(0) @binding(5) var<storage, read> a_log: array<f32>;
@group(0) @binding(6) var<storage, read> d: array<f32>;
@group(0) @binding(7) var<storage, read_write> state: array<vec4<f32>>;
//#output 8 y: 4
@group(0) @binding(9) var<storage, read> places: array<u32>;

var<workgroup> sums: array<vec4<f32>, THREADS>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let lane = index % LANES;
    let part = index / LANES;
    let column = group.x * LANES + lane;
    let unit = min(column, params.head_units - 1u);
    let group_at = group.z * params.state_stride + group.y / params.group * params.state_units;
    let state_at = (places[group.z] * params.heads + group.y) * 4u * params.state_units * params.head_units + unit;
    let size = dt[group.z * params.dt_stride + group.y];
    let keep = exp(max(-exp(a_log[group.y]) * size, -200.0));
    let own_at = (group.z * params.heads + group.y) * params.head_units + unit;
    let x = load_x(own_at);
    var sum = vec4<f32>(0.0);
    for (var n = part; n < params.state_units; n += PARTS) {
        let key = size * load_bc(group_at + n);
        let query = load_bc(params.c_at + group_at + n);
        let at = state_at + 4u * n * params.head_units;
        //#unroll n 4: let next_$n = keep * state[at + $nu * params.head_units] + key[$n] * x; sum += query[$n] * next_$n;
        if (column < params.head_units) {
            //#unroll n 4: state[at + $nu * params.head_units] = next_$n;
        }
    }
    sums[index] = sum;
    workgroupBarrier();
    if (part == 0u && column < params.head_units) {
        sum = d[group.y] * x;
        for (var p = 0u; p < PARTS; p += 1u) {
            sum += sums[p * LANES + lane];
        }
        store_y(own_at, sum);
    }
}
