// The entry of the products that pass tiles through workgroup memory, and where the units of eight
// are that fill the tiles. The main file has finish4(row, column, values), which stores four
// results; common/tile_f32.wgsl and common/tile_matrix.wgsl load the units, put them into tiles of
// a form of their own, and multiply.
//#if MATRIX
//#include common/tile_matrix.wgsl
//#include common/gemm_tile_units.wgsl
//#else
//#include common/tile_f32.wgsl
//#endif

// First row of y that this workgroup's part of k has.
var<private> below: u32;

// Whose rows this workgroup has.
var<private> expert: u32;

//#include common/gemm_rows.wgsl

// A unit of a row of x. Rows past the end repeat the last.
fn raw_unit(m: u32, unit: u32) -> Raw_x {
    return raw_row(min(m, params.rows - 1u), unit);
}

// How many units there are along k, and the one to load for any: past the end it is the last.
fn k_units() -> u32 {
    return (params.k + 7u) / 8u;
}

fn k_unit(unit: u32) -> u32 {
    return min(unit, k_units() - 1u);
}

// The factor of a unit of x: past the last k there are zeros.
fn k_factor(unit: u32) -> f32 {
    return f32(unit < k_units());
}
//#if W_ROWS

// Where the row of w begins that makes a column of the results. Columns past the end repeat the
// last.
fn w_row(column: u32) -> u32 {
    return expert * params.w_expert + min(column, params.columns - 1u) * params.w_stride;
}
//#else

// Where the eight columns of w begin that a column of the results is among, and a row of them. Rows
// past the last meet zeros of x.
fn w_columns(column: u32) -> u32 {
    return expert * params.w_expert + min(column, params.columns - 1u) / 8u;
}

fn w_row(k: u32) -> u32 {
    return min(k, params.k - 1u) * params.w_stride;
}
//#endif

fn w_stride() -> u32 {
    return params.w_stride;
}
//#if u

// A unit of u, of the r that belong to a layer. Rows past the end repeat the last.
fn term_unit_x(m: u32, layer: u32, unit: u32) -> Eight {
    let first = min(m, params.rows - 1u) * (params.r_stride / 4u) + layer * (params.r / 4u);
    return eight(load_u(first + 2u * unit), load_u(first + 2u * unit + 1u));
}
//#endif
//#if MATRIX

// What the product is multiplied by.
fn y_factor() -> f32 {
    return params.scale;
}

fn k_part() -> u32 {
    return params.k_part;
}

const BAND = 8u;

// Which tile a workgroup makes: those that run at once have BAND rows of tiles and some columns, so
// that a tile of w is met by all of them while it is in the cache.
fn tile_of(id: vec3<u32>, count: vec3<u32>) -> vec3<u32> {
    let place = id.y * count.x + id.x;
    let first = place / (BAND * count.x) * BAND;
    let rows = min(BAND, count.y - first);
    let within = place - first * count.x;
    return vec3<u32>(within / rows, first + within % rows, id.z);
}
//#endif
//#if DIRECT

// Whether all of a tile's results exist, so that they can go straight to y, and where they go there.
fn is_whole(m0: u32, c0: u32) -> bool {
    return m0 + TILE_M <= row_count() && c0 + TILE_N <= params.columns;
}

fn y_place(row: u32, column: u32, k_first: u32) -> u32 {
    // What `below` is; of a private variable no compiler knows that all invocations have the same.
    let first_row = k_first / params.k_part * params.rows;
    return (first_row + row) * params.y_stride + params.y_unit0 + column / 4u;
}

fn y_stride() -> u32 {
    return params.y_stride;
}
//#endif

@compute @workgroup_size(GROUP)
//#if MATRIX
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(num_workgroups) count: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
    let group = tile_of(id, count);
//#else
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
//#endif
    let m0 = group.y * TILE_M;
    if (m0 >= row_count()) {
        return;
    }
    let own = expert_of(m0);
    if (!is_here(own)) {
        return;
    }
    expert = own;
    below = group.z * params.rows;
    let k_first = group.z * params.k_part;
    let k_last = min(8u * k_units(), k_first + params.k_part);
//#if MATRIX
    product(index, group.z == 0u, subgroup, lane, m0, group.x * TILE_N, k_first, k_last);
//#else
    product(index, group.z == 0u, m0, group.x * TILE_N, k_first, k_last);
//#endif
}
