// Queries of new tokens, rotated as by rope/rotate_units.wgsl, and their keys and values, stored as by
// kv_cache/append.wgsl, those keys rotated, too:
//
// y[m] = rope(q[m]),  keys[places[m], positions[m]] = rope(k[m]),  values[places[m], positions[m]] = v[m]
//
// q, y (rows, HEADS heads of HEAD units of eight), k, v (rows, KV_HEADS of them); keys, values (texts,
// capacity, ·); positions and places are parts of a batch's inputs. A row of the table is that of its
// position, or of angle_rows. With weights each head is divided by the root of its mean square first,
// as by qk_norm/forward.wgsl, and rounded. Launcher: ops/fusion.py.
//#include common/flat.wgsl
//#include common/rope_units.wgsl

struct Params {
    rows: u32, //= k.rows
    capacity: u32,
    positions_at: u32,
    places_at: u32,
    eps: f32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> inputs: array<u32>;
//#input 2 table: 8 float32
//#input 3 q?: 8
//#output 4 y?: 8
//#input 5 k: 8
//#input 6 v: 8
//#output 7 keys: 8
//#output 8 values: 8
//#if angle_rows
@group(0) @binding(9) var<storage, read> angle_rows: array<u32>;
//#endif
//#input 10 q_weight?: 8 float32
//#input 11 k_weight?: 8 float32

const KV_UNITS = KV_HEADS * HEAD;

fn each(i: u32) {
    let queries = params.rows * HEADS * UNITS;
//#if q
    if (i < queries) {
        each_query(place(i, HEADS));
        return;
    }
//#endif
    let key = i - queries;
    let keys_end = params.rows * KV_HEADS * UNITS;
    if (key < keys_end) {
        each_key(place(key, KV_HEADS));
        return;
    }
    let value = key - keys_end;
    if (value < params.rows * KV_UNITS && is_kept(value / KV_UNITS)) {
        store_values(kept(value / KV_UNITS, value), load_v(value));
    }
}
//#if q

fn each_query(p: Place) {
    let r = root_q(p.first - p.t);
    if (p.t < HALF) {
        let h = rotated(table_row(p.row), p.t, 1.0, normed_q(p, 0u, r), normed_q(p, HALF, r));
        store_y(p.first, h.first);
        store_y(p.first + HALF, h.second);
    } else {
        store_y(p.first + HALF, normed_q(p, HALF, r));
    }
}

//#if q_weight
fn root_q(head: u32) -> f32 {
    var sum = 0.0;
    for (var d = 0u; d < HEAD; d += 1u) {
        let v = load_q(head + d);
        sum += dot8(v, v);
    }
    return inverseSqrt(sum / f32(8u * HEAD) + params.eps);
}

fn normed_q(p: Place, beyond: u32, r: f32) -> Eight {
    return rounded_keys(scale8(multiply8(load_q(p.first + beyond), load_q_weight(p.t + beyond)), r));
}
//#else
fn root_q(head: u32) -> f32 {
    return 1.0;
}

fn normed_q(p: Place, beyond: u32, r: f32) -> Eight {
    return load_q(p.first + beyond);
}
//#endif
//#endif

fn each_key(p: Place) {
    if (!is_kept(p.row)) {
        return;
    }
    let r = root_k(p.first - p.t);
    let at = kept(p.row, p.first);
    if (p.t < HALF) {
        let h = rotated(table_row(p.row), p.t, 1.0, normed_k(p, 0u, r), normed_k(p, HALF, r));
        store_keys(at, h.first);
        store_keys(at + HALF, h.second);
    } else {
        store_keys(at + HALF, normed_k(p, HALF, r));
    }
}

//#if k_weight
fn root_k(head: u32) -> f32 {
    var sum = 0.0;
    for (var d = 0u; d < HEAD; d += 1u) {
        let v = load_k(head + d);
        sum += dot8(v, v);
    }
    return inverseSqrt(sum / f32(8u * HEAD) + params.eps);
}

fn normed_k(p: Place, beyond: u32, r: f32) -> Eight {
    return rounded_keys(scale8(multiply8(load_k(p.first + beyond), load_k_weight(p.t + beyond)), r));
}
//#else
fn root_k(head: u32) -> f32 {
    return 1.0;
}

fn normed_k(p: Place, beyond: u32, r: f32) -> Eight {
    return load_k(p.first + beyond);
}
//#endif

fn table_row(row: u32) -> u32 {
//#if angle_rows
    return angle_rows[row];
//#else
    return inputs[params.positions_at + row];
//#endif
}

fn is_kept(row: u32) -> bool {
    return inputs[params.positions_at + row] < params.capacity;
}

// Where a unit of all rows' keys or values is kept.
fn kept(row: u32, unit: u32) -> u32 {
    let token = inputs[params.places_at + row] * params.capacity + inputs[params.positions_at + row];
    return token * KV_UNITS + unit - row * KV_UNITS;
}
