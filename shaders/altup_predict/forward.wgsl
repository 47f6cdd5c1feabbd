// y_j = x_j + Σ_i coefs[j · STREAMS + i] · x_i for every stream j, row by row (AltUp).
//
// x, y (rows, columns) are the active stream, others, y_others ((STREAMS - 1) · rows, columns) the
// rest, coefs (rows, STREAMS²); both outputs overwritten. Launcher: ops/altup.py.
//#include common/flat.wgsl
//#include common/altup.wgsl

struct Params {
    units: u32, //= x.units
    stride: u32, //= x.stride
    coefs_stride: u32, //= coefs.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 x: 8
//#input 2 others: 8
//#input 3 coefs: 1
//#output 4 y: 8
//#output 5 y_others: 8

fn stream(j: u32, at: u32) -> Eight {
    if (j == ACTIVE) {
        return load_x(at);
    }
    return load_others(first_unit(j) + at);
}

fn each(at: u32) {
    if (at >= params.units) {
        return;
    }
    let c = at / params.stride * params.coefs_stride;
    //#unroll i STREAMS: let x_$i = stream($iu, at);
    //#unroll j STREAMS
        var y_$j = x_$j;
        //#unroll i STREAMS: y_$j = add_scaled8(y_$j, load_coefs(c + $ju * STREAMS + $iu), x_$i);
        if ($ju == ACTIVE) {
            store_y(at, y_$j);
        } else {
            store_y_others(first_unit($ju) + at, y_$j);
        }
    //#end
}
