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
    //#unroll p BLOCKS, i ROWS
        // Shuffles need all invocations; rows past the end are the last one once more.
        let m_$p_$i = min(m0 + $pu * ROWS + $iu, params.rows - 1u);
        let own_$p_$i = rounded_y(finished(layer, column, sums.row_$p_$i));
        let other_$p_$i = subgroupShuffleXor(own_$p_$i, 2u * HALF);
        let angles_$p_$i = load_table(table_row(m_$p_$i) * (2u * HALF) + angle);
        let turned_$p_$i = select(own_$p_$i * angles_$p_$i.even + side * (other_$p_$i * angles_$p_$i.odd), own_$p_$i, layer == 2u);
        let next_$p_$i = subgroupShuffleXor(turned_$p_$i, 1u);
        if (layer == 0u) {
            store_y(m_$p_$i * params.y_stride + unit, turned_$p_$i);
        }
        let eight_$p_$i = eight(turned_$p_$i, next_$p_$i);
        let is_kept_$p_$i = column < params.columns && unit % 2u == 0u && positions[m_$p_$i] < params.capacity;
        if (is_kept_$p_$i && layer == 1u) {
            store_keys(kept(m_$p_$i) + (column - params.begin1) / 8u, eight_$p_$i);
        }
        if (is_kept_$p_$i && layer == 2u) {
            store_values(kept(m_$p_$i) + (column - params.begin2) / 8u, eight_$p_$i);
        }
    //#end
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
