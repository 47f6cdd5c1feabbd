// Attention on matrix units, of what walks the keys that a block of queries sees.
var<private> kv_at: u32;
var<private> own_first: u32;

//#if HALF
fn kept_k(i: u32) -> Kept {
    return halves_k(raw_k(i));
}

fn kept_v(i: u32) -> Kept {
    return halves_v(raw_v(i));
}
//#else
fn kept_k(i: u32) -> Kept {
    return load_k(i);
}

fn kept_v(i: u32) -> Kept {
    return load_v(i);
}
//#endif

fn other_0(turn: Turn, row: u32, unit: u32) -> Kept {
    return kept_k(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn other_1(turn: Turn, row: u32, unit: u32) -> Kept {
    return kept_v(kv_at + min(row, params.seq - 1u) * params.kv_stride + unit);
}

fn is_near(turn: Turn) -> bool {
    let last = min(own_first + BLOCK, params.seq) - 1u;
    return turn.other + OTHERS - 1u <= own_first && last - turn.other < params.window;
}
