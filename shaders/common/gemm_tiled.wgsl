// The entry of the products that pass tiles through workgroup memory: the main file has
// load_tiles(index, m0, c0, k0), which fills both tiles by put_x and put_w_row or put_w_column, and
// finish4(row, column, values), which stores four results.
//#if MATRIX
//#include common/tile_matrix.wgsl
//#else
//#include common/tile_f32.wgsl
//#endif

// First row of y that this workgroup's part of k has.
var<private> below: u32;

// Whose rows this workgroup has.
var<private> expert: u32;

@compute @workgroup_size(GROUP)
//#if MATRIX
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32) {
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
    let k_last = min((params.k + 7u) / 8u * 8u, k_first + params.k_part);
//#if MATRIX
    product(index, subgroup, lane, m0, group.x * TILE_N, k_first, k_last);
//#else
    product(index, m0, group.x * TILE_N, k_first, k_last);
//#endif
}
