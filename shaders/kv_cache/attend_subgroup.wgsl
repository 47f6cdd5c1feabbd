// kv_cache/attend.wgsl for software adapters, of heads of whole units of eight: a workgroup is one
// subgroup of THREADS and makes HEADS heads of a row, which share their keys and values. Invocations
// take a key each for the scores, and then GROUPS of them a unit of the head each, over every
// GROUPS-th of these keys, whose shares are broadcast. A head's sums have one order for any HEADS.
// Launcher: ops/attention.py.
//#if SOFTCAP
//#include common/tanh.wgsl
//#endif

struct Params {
    rows: u32, //= q.rows
    heads: u32,
    group: u32,
    capacity: u32,
    q_stride: u32, //= q.stride
    kv_stride: u32, //= keys.stride
    window: u32,
    scale: f32,
    softcap: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 q: 8
//#input 2 keys: 8
//#input 3 values: 8
//#output 4 o: 8
@group(0) @binding(5) var<storage, read> positions: array<u32>;
@group(0) @binding(6) var<storage, read> places: array<u32>;
//#if sinks
@group(0) @binding(7) var<storage, read> sinks: array<f32>;
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    // No invocation leaves alone: a broadcast needs all of them. Past the end the last is repeated.
    let index = HEADS * place.x;
    let at = min(index, params.rows * params.heads - HEADS);
    let m = at / params.heads;
    let head = at % params.heads;
    let thread = local.x;
    let q_at = m * params.q_stride + head * UNITS;
    let kv_at = places[m] * params.capacity * params.kv_stride + head / params.group * UNITS;
    let past = min(positions[m], params.capacity - 1u);
    let first = past + 1u - min(params.window, past + 1u);
    let unit = thread % UNITS_AT_ONCE;
    let part = thread / UNITS_AT_ONCE;
    // Of the queries each invocation loads its share, and broadcasts it.
    var queries: array<Eight, QUERIES>;
    //#unroll n QUERIES: queries[$n] = load_q(q_at + min($nu * THREADS + thread, HEADS * UNITS - 1u));
    //#unroll h HEADS
//#if sinks
        var highest_$h = sinks[head + $hu];
        var sum_$h = select(0.0, 1.0, thread == 0u);
//#else
        var highest_$h = -2.0e38;
        var sum_$h = 0.0;
//#endif
        //#unroll u OWN: var o_$h_$u = zero8();
        //#unroll d UNITS: let q_$h_$d = Eight(subgroupBroadcast(queries[($hu * UNITS + $du) / THREADS].even, ($hu * UNITS + $du) % THREADS), subgroupBroadcast(queries[($hu * UNITS + $du) / THREADS].odd, ($hu * UNITS + $du) % THREADS));
    //#end
    for (var begin = first; begin <= past; begin += THREADS) {
        let key = begin + thread;
        let k_at = kv_at + min(key, past) * params.kv_stride;
        //#unroll h HEADS: var product_$h = 0.0;
        // Values are on their way while the scores are made.
        //#unroll t TURNS
            let v_at_$t = kv_at + min(begin + $tu * GROUPS + part, past) * params.kv_stride;
            //#unroll u OWN: let raw_$t_$u = raw_values(v_at_$t + min(unit + $uu * UNITS_AT_ONCE, UNITS - 1u));
        //#end
        //#unroll d UNITS
            let key_$d = load_keys(k_at + $du);
            //#unroll h HEADS
                product_$h += dot(low(q_$h_$d), low(key_$d));
                product_$h += dot(high(q_$h_$d), high(key_$d));
            //#end
        //#end
        //#unroll h HEADS
            var score_$h = product_$h * params.scale;
//#if SOFTCAP
            score_$h = params.softcap * tanh_of(score_$h / params.softcap);
//#endif
            score_$h = select(-2.0e38, score_$h, key <= past);
            let higher_$h = max(highest_$h, subgroupMax(score_$h));
            let keep_$h = exp(highest_$h - higher_$h);
            highest_$h = higher_$h;
            let share_$h = select(0.0, exp(score_$h - higher_$h), key <= past);
            sum_$h = sum_$h * keep_$h + share_$h;
            //#unroll u OWN: o_$h_$u = scale8(o_$h_$u, keep_$h);
        //#end
        // Of those that are past the end the share is zero.
        //#unroll t TURNS
            //#unroll u OWN: let v_$t_$u = unpack_values(raw_$t_$u);
            //#unroll h HEADS
                var p_$t_$h = 0.0;
                //#unroll g GROUPS: p_$t_$h = select(p_$t_$h, subgroupBroadcast(share_$h, $tu * GROUPS + $gu), part == $gu);
                //#unroll u OWN: o_$h_$u = add_scaled8(o_$h_$u, p_$t_$h, v_$t_$u);
            //#end
        //#end
    }
    //#unroll h HEADS
        let total_$h = 1.0 / subgroupAdd(sum_$h);
        //#unroll u OWN
            let all_$h_$u = scale8(over_groups(o_$h_$u), total_$h);
            if (index < params.rows * params.heads && part == 0u && unit + $uu * UNITS_AT_ONCE < UNITS) {
                store_o(q_at + $hu * UNITS + unit + $uu * UNITS_AT_ONCE, all_$h_$u);
            }
        //#end
    //#end
}

// The sum over the invocations that have the same unit, in each of them.
fn over_groups(own: Eight) -> Eight {
    var all = own;
    //#unroll e EXCHANGES
        all.even += subgroupShuffleXor(all.even, UNITS_AT_ONCE << $eu);
        all.odd += subgroupShuffleXor(all.odd, UNITS_AT_ONCE << $eu);
    //#end
    return all;
}
