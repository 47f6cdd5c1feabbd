// How the results of products leave: four neighbours of a row at a time, into those of up to three
// layers of one input. Who includes it has Params with columns, y_unit0, y_stride, begin1, begin2,
// stride1, stride2, bias1, bias2 and, with experts, bias_expert.
//#if EIGHT
//#output 3 y: 8
//#else
//#output 3 y: 4 sum
//#endif
// Layers of one input as one product of rows: the second's and the third's results, whose columns
// begin at begin1 and begin2.
//#output 16 y1?: 4
//#output 17 y2?: 4
//#input 6 bias?: 4 float32
//#input 7 residual?: 4

// Which of several layers a column of the results belongs to, counted from 0.
fn layer_of(column: u32) -> u32 {
//#if y2
    return u32(column >= params.begin1) + u32(column >= params.begin2);
//#else
//#if y1
    return u32(column >= params.begin1);
//#else
    return 0u;
//#endif
//#endif
}

//#if bias
// Where the bias of four results is: a further layer's begins at unit bias1 or bias2, and each
// expert has bias_expert units.
fn bias_unit(row: u32, column: u32) -> u32 {
//#if y2
    if (column >= params.begin2) {
        return params.bias2 + (column - params.begin2) / 4u;
    }
//#endif
//#if y1
    if (column >= params.begin1) {
        return params.bias1 + (column - params.begin1) / 4u;
    }
//#endif
//#if tile_experts
    return tile_experts[row / EXPERT_TILE] * params.bias_expert + params.y_unit0 + column / 4u;
//#else
    return params.y_unit0 + column / 4u;
//#endif
}
//#endif

//#if EIGHT
// Eight neighbouring results of one row, zero past the last column, with nothing added.
fn store8(row: u32, column: u32, low: vec4<f32>, high: vec4<f32>) {
    let columns = vec4<u32>(column) + vec4<u32>(0u, 1u, 2u, 3u);
    let end = vec4<u32>(params.columns);
    let lo = select(vec4<f32>(0.0), low, columns < end);
    let hi = select(vec4<f32>(0.0), high, columns + vec4<u32>(4u) < end);
    store_y((row * params.y_stride + params.y_unit0 + column / 4u) / 2u, eight(lo, hi));
}
//#else
// Four neighbouring results of one row, zero past the last column, with the optional bias and
// residual, overwritten or (ACCUMULATE) added to y.
fn store4(row: u32, column: u32, value: vec4<f32>) {
    let unit = params.y_unit0 + column / 4u;
    var v = value;
//#if bias
    v += load_bias(bias_unit(row, column));
//#endif
    let columns = vec4<u32>(column) + vec4<u32>(0u, 1u, 2u, 3u);
    v = select(vec4<f32>(0.0), v, columns < vec4<u32>(params.columns));
    let at = row * params.y_stride + unit;
//#if residual
    v += load_residual(at);
//#endif
//#if y2
    if (column >= params.begin2) {
        store_y2(row * params.stride2 + (column - params.begin2) / 4u, v);
        return;
    }
//#endif
//#if y1
    if (column >= params.begin1) {
        store_y1(row * params.stride1 + (column - params.begin1) / 4u, v);
        return;
    }
//#endif
    store_y(at, v);
}
//#endif
