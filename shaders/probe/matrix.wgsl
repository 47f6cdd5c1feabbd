//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// result = left · rightᵀ (W_ROWS) or left · right by the very tile that products are made of, in
// one workgroup whose subgroups each make another part; and what each invocation sees of its
// subgroup: (size, subgroups, index of the subgroup, index within it). Launcher: gpu/probe.py.
//#include common/tile_matrix.wgsl
@group(0) @binding(1) var<storage, read> left: array<f32>;
@group(0) @binding(2) var<storage, read> right: array<f32>;
@group(0) @binding(3) var<storage, read_write> result: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> seen: array<vec4<u32>>;

fn left8(at: u32) -> Eight {
    return eight(vec4<f32>(left[at], left[at + 1u], left[at + 2u], left[at + 3u]), vec4<f32>(left[at + 4u], left[at + 5u], left[at + 6u], left[at + 7u]));
}

fn right8(at: u32) -> Eight {
    return eight(vec4<f32>(right[at], right[at + 1u], right[at + 2u], right[at + 3u]), vec4<f32>(right[at + 4u], right[at + 5u], right[at + 6u], right[at + 7u]));
}

fn load_tiles(index: u32, m0: u32, c0: u32, k0: u32) {
    for (var i = 8u * index; i < TILE_M * TILE_K; i += 8u * THREADS) {
        put_x(i / TILE_K, i % TILE_K, left8(i / TILE_K * DEPTH + k0 + i % TILE_K));
    }
    for (var i = 8u * index; i < TILE_N * TILE_K; i += 8u * THREADS) {
//#if W_ROWS
        put_w_row(i / TILE_K, i % TILE_K, right8(i / TILE_K * DEPTH + k0 + i % TILE_K));
//#else
        put_w_column(i / TILE_N, i % TILE_N, right8(k0 * TILE_N + i));
//#endif
    }
}

fn finish4(row: u32, column: u32, value: vec4<f32>) {
    if (row < TILE_M && column < TILE_N) {
        result[(row * TILE_N + column) / 4u] = value;
    }
}

@compute @workgroup_size(GROUP)
fn main(@builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32, @builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32, @builtin(num_subgroups) subgroups: u32) {
    seen[index] = vec4<u32>(size, subgroups, subgroup, lane);
    product(index, subgroup, lane, 0u, 0u, 0u, DEPTH);
}
