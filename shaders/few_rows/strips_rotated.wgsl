// Queries, keys and values as few_rows/strips.wgsl makes them, rounded as it would store them, then
// rotated and kept as by kv_cache/append_rotated.wgsl, with the same bits:
//
// y[m] = rope(q[m]),  keys[places[m], positions[m]] = rope(k[m]),  values[places[m], positions[m]] = v[m]
//
// Whole heads of 16 · HALF elements lie in a strip, all of them rotated in halves: an invocation's four
// columns meet those of the one that is 2 · HALF further or before, a power of two.
// begin1, begin2: where the columns of keys and of values begin. Launcher: ops/fusion.py.
//#include common/few_rows.wgsl
//#include common/strip_sums.wgsl
//#input 18 table: 8 float32
//#output 19 keys: 8
//#output 20 values: 8
@group(0) @binding(21) var<storage, read> positions: array<u32>;
@group(0) @binding(22) var<storage, read> places: array<u32>;
//#if angle_rows
@group(0) @binding(23) var<storage, read> angle_rows: array<u32>;
//#endif

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let unit = place.x * THREADS + local.x;
    let column = 4u * unit;
    let layer = u32(column >= params.begin1) + u32(column >= params.begin2);
    let m0 = place.y * (BLOCKS * ROWS);
    let sums = products_of(unit, layer, m0, local.x);
    // The cosines and sines of four columns are a unit of a row of the table.
    let angle = unit % (2u * HALF);
    let side = select(1.0, -1.0, unit % (4u * HALF) < 2u * HALF);
    // A loop: it compiles in a fraction of the time that all rows take one after the other.
    var rows: array<vec4<f32>, BLOCKS * ROWS>;
    //#unroll p BLOCKS, i ROWS: rows[$pu * ROWS + $iu] = sums.row_$p_$i;
    let count = min(params.rows - m0, BLOCKS * ROWS);
    // Software adapters compute both sides of a branch, and a loop without turns once: so queries, keys
    // and values have a loop each, of which a workgroup with whole heads of one of them leaves two.
    let begins = 4u * THREADS * place.x;
    let ends = begins + 4u * THREADS;
    for (var i = 0u; i < select(0u, count, begins < params.begin1); i += 1u) {
        let own = turned(m0 + i, rounded_y(finished(layer, column, rows[i])), angle, side);
        if (layer == 0u) {
            store_y((m0 + i) * params.y_stride + unit, own);
        }
    }
    let is_first = column < params.columns && unit % 2u == 0u;
    for (var i = 0u; i < select(0u, count, begins < params.begin2 && ends > params.begin1); i += 1u) {
        let own = turned(m0 + i, rounded_y(finished(layer, column, rows[i])), angle, side);
        let both = eight(own, subgroupShuffleXor(own, 1u));
        if (is_first && layer == 1u && positions[m0 + i] < params.capacity) {
            store_keys(kept(m0 + i) + (column - params.begin1) / 8u, both);
        }
    }
    for (var i = 0u; i < select(0u, count, ends > params.begin2); i += 1u) {
        let own = rounded_y(finished(layer, column, rows[i]));
        let both = eight(own, subgroupShuffleXor(own, 1u));
        if (is_first && layer == 2u && positions[m0 + i] < params.capacity) {
            store_values(kept(m0 + i) + (column - params.begin2) / 8u, both);
        }
    }
}

// Four columns of a row, rotated: shuffles need all invocations.
fn turned(row: u32, own: vec4<f32>, angle: u32, side: f32) -> vec4<f32> {
    let other = subgroupShuffleXor(own, 2u * HALF);
    let angles = load_table(table_row(row) * (2u * HALF) + angle);
    return own * angles.even + side * (other * angles.odd);
}

fn finished(layer: u32, column: u32, sums: vec4<f32>) -> vec4<f32> {
    var all = sums;
//#if bias
    let begin = select(select(0u, params.begin1, layer == 1u), params.begin2, layer == 2u);
    let first = select(select(0u, params.bias1, layer == 1u), params.bias2, layer == 2u);
    all += load_bias(first + (column - begin) / 4u);
//#endif
    return all;
}

fn table_row(row: u32) -> u32 {
//#if angle_rows
    return angle_rows[row];
//#else
    return positions[row];
//#endif
}

// Where a row's keys or values are kept, in units.
fn kept(row: u32) -> u32 {
    let token = places[row] * params.capacity + positions[row];
    return token * ((params.begin2 - params.begin1) / 8u);
}
