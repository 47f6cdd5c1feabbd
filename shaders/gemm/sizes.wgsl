// sizes[(part · blocks + block) · chunks + chunk] = the largest |x| that is finite in ROWS rows and
// GROUP units of eight of a part of the reduction, as its bits.
//
// x (rows, ·) in units of eight; with batch_info (ROW_COUNT) only the label rows from first_row on,
// since the others hold anything. One workgroup a block of rows and a chunk of units. Launcher:
// kernels/gemm/launch.py.
//#include common/gemm_factors.wgsl
@group(0) @binding(2) var<storage, read_write> sizes: array<u32>;

fn size4(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    let finite = select(vec4<u32>(0u), bits, bits < vec4<u32>(0x7f800000u));
    return max(max(finite.x, finite.y), max(finite.z, finite.w));
}

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let unit = first_unit(group) + index;
    var own = 0u;
    if (unit < units_end(group.z)) {
        // All of them are on their way before the first is looked at.
        //#unroll i ROWS: let raw_$i = raw_row(row_there(group.x * ROWS + $iu), unit);
        //#unroll i ROWS
            let v_$i = unpack_x(raw_$i);
            own = max(own, max(size4(v_$i.even), size4(v_$i.odd)));
        //#end
    }
    let all = largest_of_all(own, index);
    if (index == 0u) {
        sizes[(group.z * params.blocks + group.x) * params.chunks + group.y] = all;
    }
}
