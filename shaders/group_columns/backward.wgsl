// dx has dy's columns where forward.wgsl took them, zero elsewhere; or with ACCUMULATE dy is added
// there. Launcher: ops/columns.py.
//#include common/flat.wgsl

struct Params {
    rows: u32, //= dy.rows
    columns: u32, //= dy.columns
    groups: u32,
    group: u32,
    first: u32,
    width0: u32,
    width1: u32,
    width2: u32,
    x_stride: u32, //= dx.elements
    y_stride: u32, //= dy.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 dy: 1
//#output 2 dx: 4 sum

// The column of y that a column of x became; beyond the last one where it was not taken.
fn target_of(column: u32) -> u32 {
    let group = column / params.group;
    var inner = column % params.group;
    if (group >= params.groups || inner < params.first) {
        return params.columns;
    }
    inner -= params.first;
    if (inner < params.width0) {
        return group * params.width0 + inner;
    }
    inner -= params.width0;
    if (inner < params.width1) {
        return params.groups * params.width0 + group * params.width1 + inner;
    }
    inner -= params.width1;
    if (inner < params.width2) {
        return params.groups * (params.width0 + params.width1) + group * params.width2 + inner;
    }
    return params.columns;
}

fn given(row: u32, column: u32) -> f32 {
    if (column >= params.columns) {
        return 0.0;
    }
    return load_dy(row * params.y_stride + column);
}

fn each(i: u32) {
    let units = params.x_stride / 4u;
    let row = i / units;
    if (row >= params.rows) {
        return;
    }
    let c = 4u * (i % units);
    let targets = vec4<u32>(target_of(c), target_of(c + 1u), target_of(c + 2u), target_of(c + 3u));
//#if ACCUMULATE
    if (all(targets >= vec4<u32>(params.columns))) {
        return;
    }
//#endif
    store_dx(i, vec4<f32>(given(row, targets.x), given(row, targets.y), given(row, targets.z), given(row, targets.w)));
}
