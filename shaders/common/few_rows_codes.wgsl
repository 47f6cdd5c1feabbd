// Codes of quantized matrices as products of few rows read them: CHUNK units of eight at a time, 16
// bytes of them where rows are whole such pieces. A code's value is quant_value(code); with AFFINE
// that is the first value plus the code, with SELECTS (4 bits) it is chosen without a look-up, else it
// is looked up in workgroup memory.

// Where the codes of a row begin, in words.
fn codes_of_row(matrix: u32, row: u32) -> u32 {
    return codes_begin(matrix) + row * params.units * UNIT_WORDS;
}

// A chunk's words; `unit` is a multiple of CHUNK.
fn chunk_at(begin: u32, unit: u32) -> vec4<u32> {
    let at = begin + unit * UNIT_WORDS;
//#if WHOLE
//#if FOURS
    return group[at / 4u];
//#else
    return vec4<u32>(group[at], group[at + 1u], group[at + 2u], group[at + 3u]);
//#endif
//#else
//#if EIGHT_BITS
    return vec4<u32>(word_at(at), word_at(at + 1u), 0u, 0u);
//#else
    return vec4<u32>(word_at(at), 0u, 0u, 0u);
//#endif
//#endif
}

//#if AFFINE
var<private> first_value: f32;

fn begin_values(thread: u32, threads: u32) {
    first_value = quant_value(0u);
}

fn value_of(code: u32) -> f32 {
    return f32(i32(code)) + first_value;
}
//#else
//#if SELECTS
// A private array that is indexed by constants lies in registers.
var<private> value: array<f32, 16>;

fn begin_values(thread: u32, threads: u32) {
    //#unroll e 16: value[$e] = quant_value($eu);
}

fn value_of(code: u32) -> f32 {
    let b0 = (code & 1u) != 0u;
    let b1 = (code & 2u) != 0u;
    //#unroll q 4: let q_$q = select(select(value[4 * $q], value[4 * $q + 1], b0), select(value[4 * $q + 2], value[4 * $q + 3], b0), b1);
    let b2 = (code & 4u) != 0u;
    return select(select(q_0, q_1, b2), select(q_2, q_3, b2), (code & 8u) != 0u);
}
//#else
// For all of a workgroup.
var<workgroup> value: array<f32, VALUES>;

fn begin_values(thread: u32, threads: u32) {
    for (var i = thread; i < VALUES; i += threads) {
        value[i] = quant_value(i);
    }
    workgroupBarrier();
}

fn value_of(code: u32) -> f32 {
    return value[code];
}
//#endif
//#endif
//#include common/code_units.wgsl
//#include common/block_at.wgsl
