// The rows that a reduction over rows has: all, or where expert_rows is bound those of the expert
// that the workgroup's z says.
//#if expert_rows
@group(0) @binding(5) var<storage, read> expert_rows: array<u32>;

fn first_row(expert: u32) -> u32 {
    return expert_rows[2u * expert];
}

fn rows_end(expert: u32) -> u32 {
    return expert_rows[2u * expert + 1u];
}
//#else
fn first_row(expert: u32) -> u32 {
    return 0u;
}

fn rows_end(expert: u32) -> u32 {
    return params.rows;
}
//#endif
