// o[m, head] = Σ_key p[key] · values[place, key],  p = softmax of scale · q[m, head]·keys[place, key]
// (softcapped with SOFTCAP) over the keys up to positions[m] that are within the window; with sinks
// (heads), the sum of exponentials has exp(sink) besides.
//
// q, o (rows, heads · head_dim), o overwritten, its padding with zeros; keys, values (texts, capacity,
// kv_heads · head_dim). THREADS invocations share a head of a row: they take KEYS keys each at a time,
// and then GROUPS of them a unit of the head each, over every GROUPS-th of these keys, TOGETHER in a
// turn of a loop, since software GPUs (SOFTWARE) end a shader's loops after 65,535 turns of all
// together.
// Launcher: ops/attention.py.
//#include common/row_reduce.wgsl
//#include common/head_value.wgsl
//#if SOFTCAP
//#include common/tanh.wgsl
//#endif

struct Params {
    rows: u32, //= q.rows
    heads: u32,
    group: u32,
    capacity: u32,
    q_stride: u32,
    kv_stride: u32, //= keys.stride
    window: u32,
    scale: f32,
    softcap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#if HEAD_UNIT4
//#input 1 q: 4 buffer
//#input 2 keys: 4
//#input 3 values: 4
//#output 4 o: 4
//#else
//#input 1 q: 2
//#input 2 keys: 2
//#input 3 values: 2
//#output 4 o: 2
//#endif
@group(0) @binding(5) var<storage, read> positions: array<u32>;
@group(0) @binding(6) var<storage, read> places: array<u32>;
//#if sinks
@group(0) @binding(7) var<storage, read> sinks: array<f32>;
//#endif

//#if ONE_THREAD
fn barrier() {
}
//#else
fn barrier() {
    workgroupBarrier();
}
//#endif

var<workgroup> shares: array<f32, ROWS * KEYS * THREADS>;
var<workgroup> made: array<HeadValue, ROWS * GROUPS * UNITS>;

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
//#if ONE_THREAD
    let index = place.x * ROWS + local.y;
    let own = local.y;
//#else
    // Of the workgroup alone, so that loops are as long for all.
    let index = place.x;
    let own = 0u;
//#endif
    // Every invocation reaches the barriers; one past the end repeats the last head, unstored.
    let at = min(index, params.rows * params.heads - 1u);
    let m = at / params.heads;
    let head = at % params.heads;
    let thread = local.x;
    let q_at = m * params.q_stride + head * UNITS;
    let kv_at = places[m] * params.capacity * params.kv_stride + head / params.group * UNITS;
    let past = min(positions[m], params.capacity - 1u);
    let first = past + 1u - min(params.window, past + 1u);
    let own_shares = own * KEYS * THREADS;
    let units = thread % UNITS_AT_ONCE;
    let part = thread / UNITS_AT_ONCE;
//#if sinks
    var highest = sinks[head];
    var sum = select(0.0, 1.0, thread == 0u);
//#else
    var highest = -2.0e38;
    var sum = 0.0;
//#endif
    //#unroll u OWN: var o_$u = HeadValue(0.0);
//#if SOFTWARE
    //#unroll d UNITS: let q_$d = load_q(q_at + $du);
//#endif
    for (var begin = first; begin <= past; begin += KEYS * THREADS) {
        var most = -2.0e38;
        //#unroll e KEYS
            let key_$e = begin + $eu * THREADS + thread;
            var score_$e = -2.0e38;
            if (key_$e <= past) {
                var product = 0.0;
                let k_at = kv_at + key_$e * params.kv_stride;
//#if SOFTWARE
                //#unroll d UNITS: product += dot(q_$d, load_keys(k_at + $du));
//#else
//#if LOADS_FEW
                // No compiler knows the bound, and loads all before it multiplies: rows are never 0.
                for (var d = 0u; d < select(UNITS, 0u, params.rows == 0u); d += AHEAD) {
                    //#unroll a AHEAD: product += dot(load_q(q_at + d + $au), load_keys(k_at + d + $au));
                }
//#else
                //#unroll d UNITS: product += dot(load_q(q_at + $du), load_keys(k_at + $du));
//#endif
//#endif
                score_$e = product * params.scale;
//#if SOFTCAP
                score_$e = params.softcap * tanh_of(score_$e / params.softcap);
//#endif
            }
            most = max(most, score_$e);
        //#end
        let higher = max(highest, reduce_max(most, thread));
        let keep = exp(highest - higher);
        highest = higher;
        sum *= keep;
        //#unroll e KEYS
            let share_$e = select(0.0, exp(score_$e - higher), key_$e <= past);
            sum += share_$e;
            shares[own_shares + $eu * THREADS + thread] = share_$e;
        //#end
        //#unroll u OWN: o_$u *= keep;
        barrier();
        let count = min(KEYS * THREADS, past + 1u - begin);
        if (part < GROUPS) {
            for (var i = part; i < count; i += TOGETHER * GROUPS) {
                //#unroll t TOGETHER
                    let i_$t = min(i + $tu * GROUPS, count - 1u);
                    let p_$t = select(0.0, shares[own_shares + i_$t], i + $tu * GROUPS < count);
                    let v_at_$t = kv_at + (begin + i_$t) * params.kv_stride;
                    //#unroll u OWN: o_$u += p_$t * load_values(v_at_$t + min(units + $uu * UNITS_AT_ONCE, UNITS - 1u));
                //#end
            }
        }
        barrier();
    }
    let total = reduce_sum(sum, thread);
    let own_made = own * GROUPS * UNITS;
    if (part < GROUPS) {
        //#unroll u OWN: if (units + $uu * UNITS_AT_ONCE < UNITS) { made[own_made + part * UNITS + units + $uu * UNITS_AT_ONCE] = o_$u; }
    }
    barrier();
    if (index >= params.rows * params.heads) {
        return;
    }
    for (var unit = thread; unit < UNITS; unit += THREADS) {
        var all = HeadValue(0.0);
        for (var g = 0u; g < GROUPS; g += 1u) {
            all += made[own_made + g * UNITS + unit];
        }
        store_o(m * params.q_stride + head * UNITS + unit, all * (1.0 / total));
    }
    if (head == params.heads - 1u) {
        for (var unit = params.heads * UNITS + thread; unit < params.q_stride; unit += THREADS) {
            store_o(m * params.q_stride + unit, HeadValue(0.0));
        }
    }
}
