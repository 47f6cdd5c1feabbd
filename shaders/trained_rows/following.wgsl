// following[m] = the next place of the token ids[m] in the batch, or rows where there is none; beside
// it, in the highest bit, whether the sum for a token does not begin here: it is there before, its
// row is not trained, or it is padding.
//
// ids, following (rows), slots (vocabulary): where a token's row is among the trained ones, or
// 0xffffffff; without slots all are trained. An invocation per place, which looks both ways.
// Launchers: ops/trained_gradients.py, ops/trained_gradients.py.

struct Params {
    rows: u32, //= following.elements
    padding: u32,
}

const NOT_FIRST = 0x80000000u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<u32>;
//#if slots
@group(0) @binding(2) var<storage, read> slots: array<u32>;
//#endif
@group(0) @binding(3) var<storage, read_write> following: array<u32>;

fn is_trained(id: u32) -> bool {
//#if slots
    return slots[id] != 0xffffffffu;
//#else
    return true;
//#endif
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let m = group.x * THREADS + thread;
    if (m >= params.rows) {
        return;
    }
    let id = ids[m];
    if (id == params.padding || !is_trained(id)) {
        following[m] = NOT_FIRST;
        return;
    }
    var first = 0u;
    for (var before = m; before > 0u; before -= 1u) {
        if (ids[before - 1u] == id) {
            first = NOT_FIRST;
            break;
        }
    }
    var next = m + 1u;
    while (next < params.rows) {
        if (ids[next] == id) {
            break;
        }
        next += 1u;
    }
    following[m] = first | next;
}
