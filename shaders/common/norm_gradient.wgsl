// The gradient that a norm hands on, and its copy for products, if one is wanted.
fn store_both(at: u32, value: Eight) {
//#if dx_operand
//#if dx_before
    store_dx_operand(at, add8(load_dx_before(at), value));
    store_dx(at, value);
//#else
    var v = value;
//#if ACCUMULATE
    v = add8(eight(dx[at].lo, dx[at].hi), v);
    dx[at] = Float8(low(v), high(v));
//#else
    store_dx(at, value);
//#endif
    store_dx_operand(at, v);
//#endif
//#else
    store_dx(at, value);
//#endif
}
