// A of the workgroup's memory becomes what T = (I + A)⁻¹ is below its diagonal.
//
// Blocks of 16 by 16: those on the diagonal by forward substitution, an invocation for a column; then
// row I of blocks, one after the other, T_IJ = -T_II · Σ_{J ≤ K < I} A_IK · T_KJ.
// SIDES = CHUNK / 16, OWN = 256 / THREADS elements of a block are an invocation's.

const SIDE = 16u;

fn own_row(index: u32, e: u32) -> u32 {
    return (index + e * THREADS) / SIDE;
}

fn own_column(index: u32, e: u32) -> u32 {
    return (index + e * THREADS) % SIDE;
}

// (I + A) or T, wherever its blocks are so far.
fn at_or_below(i: u32, j: u32) -> f32 {
    if (i > j) {
        return lower[place(i, j)];
    }
    return select(0.0, 1.0, i == j);
}

fn invert(index: u32) {
    let corner = index / SIDE * SIDE;
    let column = index % SIDE;
    //#unroll i 16: var t_$i = select(0.0, 1.0, column == $iu);
    if (index < CHUNK) {
        //#unroll i 16, m 16: if ($iu > $mu) { t_$i -= lower[place(corner + max($iu, 1u), corner + $mu)] * t_$m; }
    }
    workgroupBarrier();
    if (index < CHUNK) {
        //#unroll i 16: if ($iu > column) { lower[place(corner + $iu, corner + column)] = t_$i; }
    }
    workgroupBarrier();
    //#unroll side SIDES
    if ($sideu > 0u) {
        let first_$side = $sideu * SIDE;
        //#unroll block SIDES, e OWN: var sum_$side_$block_$e = 0.0;
        //#unroll block SIDES, e OWN
        if ($blocku < $sideu) {
            let i = first_$side + own_row(index, $eu);
            let j = $blocku * SIDE + own_column(index, $eu);
            for (var m = $blocku * SIDE; m < first_$side; m += 1u) {
                sum_$side_$block_$e += lower[place(i, m)] * at_or_below(m, j);
            }
        }
        //#end
        workgroupBarrier();
        //#unroll block SIDES, e OWN
        if ($blocku < $sideu) {
            lower[place(first_$side + own_row(index, $eu), $blocku * SIDE + own_column(index, $eu))] = sum_$side_$block_$e;
            sum_$side_$block_$e = 0.0;
        }
        //#end
        workgroupBarrier();
        //#unroll block SIDES, e OWN
        if ($blocku < $sideu) {
            let i = first_$side + own_row(index, $eu);
            let j = $blocku * SIDE + own_column(index, $eu);
            for (var m = first_$side; m <= i; m += 1u) {
                sum_$side_$block_$e -= at_or_below(i, m) * lower[place(m, j)];
            }
        }
        //#end
        workgroupBarrier();
        //#unroll block SIDES, e OWN
        if ($blocku < $sideu) {
            lower[place(first_$side + own_row(index, $eu), $blocku * SIDE + own_column(index, $eu))] = sum_$side_$block_$e;
        }
        //#end
        workgroupBarrier();
    }
    //#end
}
