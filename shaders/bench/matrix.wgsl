//#if HALF
enable f16;
//#endif
enable chromium_experimental_subgroup_matrix;
// The most that matrix units multiply: eight independent sums of a subgroup, of four left and two
// right matrices that are loaded once. Subgroups have SUBGROUP_SIZE invocations. Launcher:
// bench/roofline.py.

struct Params {
    turns: u32,
}

//#if HALF
alias Factor = f16;
//#else
alias Factor = f32;
//#endif

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> sums: array<f32>;

var<workgroup> left: array<Factor, 4u * M * K>;
var<workgroup> right: array<Factor, 2u * K * N>;
var<workgroup> results: array<f32, SUBGROUPS * M * N>;

@compute @workgroup_size(GROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32) {
    for (var i = index; i < 4u * M * K; i += GROUP) {
        left[i] = Factor(i32(i * 7u % 11u) - 5);
    }
    for (var i = index; i < 2u * K * N; i += GROUP) {
        right[i] = Factor(i32(i * 5u % 13u) - 6);
    }
    workgroupBarrier();
    //#unroll i 4: let a_$i = subgroupMatrixLoad<subgroup_matrix_left<Factor, K, M>, row_major>(&left, $iu * M * K, K);
    //#unroll j 2: let b_$j = subgroupMatrixLoad<subgroup_matrix_right<Factor, N, K>, row_major>(&right, $ju * K * N, N);
    //#unroll i 4, j 2: var sum_$i_$j: subgroup_matrix_result<f32, N, M>;
    for (var turn = 0u; turn < params.turns; turn += 1u) {
        //#unroll i 4, j 2: sum_$i_$j = subgroupMatrixMultiplyAccumulate(a_$i, b_$j, sum_$i_$j);
    }
    // Every sum is used, or its products would be left out.
    var total = 0.0;
    let mine = min(subgroup, SUBGROUPS - 1u) * M * N;
    //#unroll i 4, j 2
        subgroupMatrixStore<row_major>(&results, mine, sum_$i_$j, N);
        workgroupBarrier();
        total += results[index % (SUBGROUPS * M * N)];
        workgroupBarrier();
    //#end
    sums[group.x * GROUP + index] = total;
}
