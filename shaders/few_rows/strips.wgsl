// common/few_rows.wgsl for software adapters, of a matrix in strips (common/strip_sums.wgsl): as
// few_rows/subgroup.wgsl, but what the subgroup reads at a time lies together, and all of a strip in
// the order in which it is read.
//#include common/few_rows.wgsl
//#include common/strip_sums.wgsl

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let unit = place.x * THREADS + local.x;
    let m0 = place.y * (BLOCKS * ROWS);
    let sums = products_of(unit, layer_of(4u * unit), m0, local.x);
    //#unroll p BLOCKS, i ROWS
        if (m0 + $pu * ROWS + $iu < params.rows && 4u * unit < padded_columns()) {
            store4(m0 + $pu * ROWS + $iu, 4u * unit, sums.row_$p_$i);
        }
    //#end
}
