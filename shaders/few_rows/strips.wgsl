// common/few_rows.wgsl for software adapters, of a matrix in strips (common/strip_sums.wgsl): as
// few_rows/subgroup.wgsl, but what the subgroup reads at a time lies together, and all of a strip in
// the order in which it is read.
//#include common/few_rows.wgsl
//#include common/strip_sums.wgsl

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) place: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let column = 4u * (place.x * THREADS + local.x);
    let m0 = place.y * ROWS;
    let sums = sums_of(place.x * THREADS + local.x, m0, local.x);
    //#unroll i ROWS
        if (m0 + $iu < params.rows && column < padded_columns()) {
            var all_$i = params.scale * sums.row_$i;
            for (var k = 0u; k < term_units(); k += 1u) {
                all_$i += term4(m0 + $iu, layer_of(column), column, 0u, k);
            }
            store4(m0 + $iu, column, all_$i);
        }
    //#end
}
