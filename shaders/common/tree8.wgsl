// dot8 as a tree: in one after the other, each addition would wait for the one before.
fn tree8(a: Eight, b: Eight) -> f32 {
    let fours = a.even * b.even + a.odd * b.odd;
    return (fours.x + fours.y) + (fours.z + fours.w);
}
