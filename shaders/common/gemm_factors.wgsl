// What is looked at before x is multiplied on matrix units in f16: how large it is, and its copy. A
// workgroup has ROWS rows and GROUP units of eight; along the reduction they begin anew at each part.
struct Params {
    rows: u32, //= x.rows
    units: u32,
    part: u32,
    blocks: u32,
    chunks: u32,
    x_stride: u32,
    x_unit0: u32,
    first_row: u32,
    begin1: u32,
    begin2: u32,
    stride1: u32,
    stride2: u32,
    expert0: u32,
    experts: u32,
    lora_expert: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#include common/gemm_rows.wgsl
//#if batch_info
@group(0) @binding(3) var<storage, read> batch_info: array<u32>;
//#endif

fn rows_there() -> u32 {
//#if batch_info
    return min(params.rows, max(batch_info[0], params.first_row) - params.first_row);
//#else
    return params.rows;
//#endif
}

// Rows past the end repeat the last.
fn row_there(row: u32) -> u32 {
    return min(row, max(rows_there(), 1u) - 1u);
}

fn first_unit(group: vec3<u32>) -> u32 {
    return group.z * params.part + group.y * GROUP;
}

fn units_end(part: u32) -> u32 {
    return min((part + 1u) * params.part, params.units);
}
//#if sizes

var<workgroup> largest: array<u32, GROUP>;

// The largest of what all invocations have.
fn largest_of_all(own: u32, index: u32) -> u32 {
    largest[index] = own;
    workgroupBarrier();
    for (var half = GROUP / 2u; half > 0u; half /= 2u) {
        if (index < half) {
            largest[index] = max(largest[index], largest[index + half]);
        }
        workgroupBarrier();
    }
    return largest[0];
}
//#endif
