// What a short convolution is of, eight channels by their unit; stride and hidden count units of eight.
//#if GATED
// x (rows, 3 · hidden) is [gate in | gate out | value].
fn gate_in(row: u32, unit: u32) -> Eight {
    return load_x(row * params.stride + unit);
}

fn value(row: u32, unit: u32) -> Eight {
    return load_x(row * params.stride + 2u * params.hidden + unit);
}

fn convolved(row: u32, unit: u32) -> Eight {
    return multiply8(gate_in(row, unit), value(row, unit));
}
//#else
fn convolved(row: u32, unit: u32) -> Eight {
    return load_x(row * params.stride + unit);
}
//#endif
