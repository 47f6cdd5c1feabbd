// A of the workgroup's memory becomes what T = (I + A)⁻¹ is below its diagonal.
//
// In blocks of SIDE by SIDE: those on the diagonal by forward substitution, row by row; then those
// below, T_IJ = -T_II · Σ_{J ≤ K < I} A_IK · T_KJ, of which no later one needs A_IJ.

const SIDE = 16u;

var<workgroup> product: array<f32, SIDE * SIDE>;

// (I + A) or T, wherever its blocks are so far.
fn at_or_below(i: u32, j: u32) -> f32 {
    if (i > j) {
        return lower[place(i, j)];
    }
    return select(0.0, 1.0, i == j);
}

fn invert_diagonal(index: u32) {
    let corner = index / SIDE * SIDE;
    let column = corner + index % SIDE;
    for (var row = 1u; row < SIDE; row += 1u) {
        let i = corner + row;
        var sum = 0.0;
        if (index < CHUNK && column < i) {
            sum = lower[place(i, column)];
            for (var m = column + 1u; m < i; m += 1u) {
                sum += lower[place(i, m)] * lower[place(m, column)];
            }
        }
        workgroupBarrier();
        if (index < CHUNK && column < i) {
            lower[place(i, column)] = -sum;
        }
        workgroupBarrier();
    }
}

fn invert(index: u32) {
    invert_diagonal(index);
    for (var first = SIDE; first < CHUNK; first += SIDE) {
        for (var left = 0u; left < first; left += SIDE) {
            for (var e = index; e < SIDE * SIDE; e += THREADS) {
                let i = first + e / SIDE;
                let j = left + e % SIDE;
                var sum = 0.0;
                for (var m = left; m < first; m += 1u) {
                    sum += lower[place(i, m)] * at_or_below(m, j);
                }
                product[e] = sum;
            }
            workgroupBarrier();
            for (var e = index; e < SIDE * SIDE; e += THREADS) {
                let i = first + e / SIDE;
                var sum = 0.0;
                for (var m = first; m <= i; m += 1u) {
                    sum += at_or_below(i, m) * product[(m - first) * SIDE + e % SIDE];
                }
                lower[place(i, left + e % SIDE)] = -sum;
            }
            workgroupBarrier();
        }
    }
}
