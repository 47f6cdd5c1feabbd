//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// y = x · wᵀ (W_ROWS) or x · w by the very tile that products are made of, in
// one workgroup whose subgroups each make another part; and what each invocation sees of its
// subgroup: (size, subgroups, index of the subgroup, index within it). Launcher: gpu/probe.py.
//#include common/tile_matrix.wgsl
//#input 1 x: 8
//#input 2 w: 8
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> seen: array<vec4<u32>>;

fn x_place(m: u32, unit: u32) -> u32 {
    return min(m, TILE_M - 1u) * x_stride() + unit;
}

fn x_stride() -> u32 {
    return DEPTH / 8u;
}
//#if W_ROWS

fn w_row(n: u32) -> u32 {
    return min(n, TILE_N - 1u) * w_stride();
}

fn w_stride() -> u32 {
    return DEPTH / 8u;
}
//#else

fn w_columns(n: u32) -> u32 {
    return n / 8u;
}

fn w_stride() -> u32 {
    return TILE_N / 8u;
}
//#endif

fn k_part() -> u32 {
    return DEPTH;
}
//#if DIRECT

fn is_whole(m0: u32, c0: u32) -> bool {
    return true;
}

fn y_place(row: u32, column: u32, k_first: u32) -> u32 {
    return (row * TILE_N + column) / 4u;
}

fn y_stride() -> u32 {
    return TILE_N / 4u;
}
//#endif

fn y_factor() -> f32 {
    return 1.0;
}

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    if (row < TILE_M && column < TILE_N) {
        y[(row * TILE_N + column) / 4u] = value;
    }
}

@compute @workgroup_size(GROUP)
fn main(@builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32, @builtin(num_subgroups) subgroups: u32) {
    seen[index] = vec4<u32>(size, subgroups, subgroup, lane);
    product(index, true, subgroup, lane, 0u, 0u, 0u, DEPTH);
}
