// factors = x as f16, of which products on matrix units make their tiles: of all that is along the
// reduction, also of several layers of one input.
//
// Where `sizes` is bound, x is multiplied by the power of two that puts the largest of each TILE_ROWS
// rows of a part just below f16's end, whose exponent goes to `exponents` as float32 has it. Else
// what is finite and beyond the end is held there, and counted in `saturated`, if that is bound.
// Launcher: kernels/gemm/launch.py.
//#include common/gemm_factors.wgsl
//#output 2 factors: 8
//#include common/experts.wgsl
//#if sizes
@group(0) @binding(4) var<storage, read> sizes: array<u32>;
@group(0) @binding(5) var<storage, read_write> exponents: array<u32>;
//#endif
//#if saturated
@group(0) @binding(15) var<storage, read_write> saturated: array<atomic<u32>>;
//#endif

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * ROWS;
    if (first >= rows_there() || !is_here(expert_of(first))) {
        return;
    }
    let unit = first_unit(group) + index;
    let loaded = min(unit, params.units - 1u);
    // All of them are on their way before the first is waited for.
    //#unroll i ROWS: let raw_$i = raw_row(row_there(first + $iu), loaded);
//#if sizes
    let block = first / TILE_ROWS * (TILE_ROWS / ROWS);
    let begin = (group.z * params.blocks + block) * params.chunks;
    let end = begin + min(TILE_ROWS / ROWS, params.blocks - block) * params.chunks;
    var own = 0u;
    for (var i = begin + index; i < end; i += GROUP) {
        own = max(own, sizes[i]);
    }
    // 2¹⁴ is a power below f16's end, and leaves it room to round. The bias is 127; the factor and
    // its inverse stay normal.
    let exponent = u32(clamp(127 + 14 + 127 - i32(largest_of_all(own, index) >> 23u), 1, 253));
    if (index == 0u && group.y == 0u && first % TILE_ROWS == 0u) {
        exponents[group.z * ((params.rows + TILE_ROWS - 1u) / TILE_ROWS) + first / TILE_ROWS] = exponent;
    }
    let scale = bitcast<f32>(exponent << 23u);
//#else
    let scale = 1.0;
//#endif
    if (unit >= units_end(group.z)) {
        return;
    }
    var beyond = 0u;
    //#unroll i ROWS
        if (first + $iu < rows_there()) {
            let v_$i = unpack_x(raw_$i);
//#if saturated
            beyond += beyond8(v_$i);
//#endif
            store_factors((first + $iu) * params.units + unit, scale8(v_$i, scale));
        }
    //#end
//#if saturated
    if (beyond > 0u) {
        atomicAdd(&saturated[0], beyond);
    }
//#endif
}
