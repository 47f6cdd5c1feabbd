// Rows of x in units of eight as they are stored; the main file declares x. Where layers of one
// input are one product, the gradients of the second and the third follow in x1 and x2, whose units
// begin at begin1 and begin2; all three are of one type.
//#input 18 x1?: 8
//#input 19 x2?: 8

fn raw_row(m: u32, unit: u32) -> Raw_x {
    return raw_row_from(m, unit, 0u);
}

// The same of a unit behind the first one of those that are of the same layer.
fn raw_row_from(m: u32, first: u32, unit: u32) -> Raw_x {
//#if x2
    if (first >= params.begin2) {
        return raw_x2(m * params.stride2 + unit + (first - params.begin2));
    }
//#endif
//#if x1
    if (first >= params.begin1) {
        return raw_x1(m * params.stride1 + unit + (first - params.begin1));
    }
//#endif
    return raw_x(m * params.x_stride + params.x_unit0 + unit + first);
}
