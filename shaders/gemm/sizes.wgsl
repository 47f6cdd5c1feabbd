// sizes[part, i] = the largest |x| that is finite in rows ROWS·i to ROWS·(i + 1) - 1 of that part of
// the reduction, as its bits.
//
// x (rows, ·) in units of eight; with batch_info (ROW_COUNT) only the label rows from first_row on,
// since the others hold anything. One workgroup a block of rows of a part. Launcher:
// kernels/gemm/matrix_units.py.
struct Params {
    rows: u32,
    stride: u32,
    first_row: u32,
    stride1: u32,
    stride2: u32,
    part: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
// Of layers of one input: the gradients of the second and the third, which are one with x.
//#input 4 x1?: 8
//#input 5 x2?: 8
@group(0) @binding(2) var<storage, read_write> sizes: array<u32>;
//#if batch_info
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
//#endif

var<workgroup> largest: array<u32, GROUP>;

fn rows_there() -> u32 {
//#if batch_info
    return min(params.rows, max(batch_info[0], params.first_row) - params.first_row);
//#else
    return params.rows;
//#endif
}

fn size4(v: vec4<f32>) -> u32 {
    let bits = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
    let finite = select(vec4<u32>(0u), bits, bits < vec4<u32>(0x7f800000u));
    return max(max(finite.x, finite.y), max(finite.z, finite.w));
}

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let first = group.x * ROWS;
    let end = min(first + ROWS, rows_there());
    var own = 0u;
//#if PARTS
    let unit0 = group.y * params.part;
    let unit1 = min(unit0 + params.part, params.stride);
    for (var row = first; row < end; row += 1u) {
        for (var i = unit0 + index; i < unit1; i += GROUP) {
            let v = load_x(row * params.stride + i);
            own = max(own, max(size4(v.even), size4(v.odd)));
        }
    }
//#else
    for (var i = first * params.stride + index; i < end * params.stride; i += GROUP) {
        let v = load_x(i);
        own = max(own, max(size4(v.even), size4(v.odd)));
    }
//#endif
//#if x1
    for (var i = first * params.stride1 + index; i < end * params.stride1; i += GROUP) {
        let v = load_x1(i);
        own = max(own, max(size4(v.even), size4(v.odd)));
    }
//#endif
//#if x2
    for (var i = first * params.stride2 + index; i < end * params.stride2; i += GROUP) {
        let v = load_x2(i);
        own = max(own, max(size4(v.even), size4(v.odd)));
    }
//#endif
    largest[index] = own;
    workgroupBarrier();
    for (var half = GROUP / 2u; half > 0u; half /= 2u) {
        if (index < half) {
            largest[index] = max(largest[index], largest[index + half]);
        }
        workgroupBarrier();
    }
    if (index == 0u) {
        sizes[group.y * ((params.rows + ROWS - 1u) / ROWS) + group.x] = largest[0];
    }
}
