// AdamW over the flat adapter as update.wgsl has it, with moments in 8 bits: blocks of 256 elements
// of a tensor, its rows without their padding, in codes of a table of 256 values times the block's
// largest magnitude (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022).
//
// A block of m is 64 words of four codes, and a word with the magnitude; small tensors have blocks of
// 256 words of float32 instead. Codes are the nearest; that of a negative m is never zero's.
//
// table: 256 values of m, 256 of v, and for each tensor its first block, the first word of that, its
// first element in the flat vector, the columns, the stride and the elements, and a block's words.
// A row of THREADS invocations makes a block, in two rounds: what the first finds the largest of, the
// second computes again. With GRADIENT_HALVES the gradient is bfloat16, and another launch zeroes it.
// Launcher: ops/optimizers.py.
//#include common/row_reduce.wgsl

struct Params {
    first_block: u32, // of this launch
    blocks: u32,
    first_word: u32, // of what is bound of m and v
    first_element: u32, // of what is bound of p and the gradient
    tensors: u32,
    search: u32, // the largest power of two below their number
    beta1: f32,
    beta2: f32,
    epsilon: f32,
    weight_decay: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    split: u32, // the first element of what is bound with the second learning rate
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> step_info: array<f32>;
@group(0) @binding(2) var<storage, read> stats: array<f32>;
@group(0) @binding(3) var<storage, read_write> p: array<f32>;
//#if GRADIENT_HALVES
@group(0) @binding(4) var<storage, read> gradient: array<u32>;
//#else
@group(0) @binding(4) var<storage, read_write> gradient: array<f32>;
//#endif
@group(0) @binding(5) var<storage, read_write> m: array<u32>;
@group(0) @binding(6) var<storage, read_write> v: array<u32>;
@group(0) @binding(7) var<storage, read> table: array<u32>;

const QUADS = 64u; // four elements each
const OF_V = 256u; // where v's values begin
const ROWS_BEGIN = 512u;
const ROW_WORDS = 8u;

struct Block {
    at: u32, // its first word
    element: u32, // its first element within the tensor
    elements: u32, // the tensor's; none of a block that is not there
    offset: u32, // in what is bound
    columns: u32,
    stride: u32,
    in_codes: bool,
    m_scale: f32,
    v_scale: f32,
}

struct Moments {
    m: vec4<f32>,
    v: vec4<f32>,
}

fn row_of(tensor: u32) -> u32 {
    return ROWS_BEGIN + ROW_WORDS * tensor;
}

fn find_block(own: u32) -> Block {
    let block = params.first_block + own;
    var tensor = 0u;
    for (var step = params.search; step > 0u; step /= 2u) {
        let further = min(tensor + step, params.tensors - 1u);
        if (table[row_of(further)] <= block) {
            tensor = further;
        }
    }
    let row = row_of(tensor);
    let index = block - table[row];
    let words = table[row + 6u];
    let at = table[row + 1u] + index * words - params.first_word;
    let there = own < params.blocks;
    let in_codes = words != 4u * QUADS;
    var m_scale = 0.0;
    var v_scale = 0.0;
    if (there && in_codes) {
        m_scale = bitcast<f32>(m[at + QUADS]);
        v_scale = bitcast<f32>(v[at + QUADS]);
    }
    return Block(
        at, index * 4u * QUADS, select(0u, table[row + 5u], there),
        table[row + 2u] - params.first_element,
        table[row + 3u], table[row + 4u], in_codes, m_scale, v_scale,
    );
}

fn value(code: u32) -> f32 {
    return bitcast<f32>(table[code]);
}

fn of_codes(word: u32, first: u32, scale: f32) -> vec4<f32> {
    let codes = ((vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u)) + first;
    return scale * vec4<f32>(value(codes.x), value(codes.y), value(codes.z), value(codes.w));
}

// Where an element of the tensor lies in the flat vectors.
fn place(block: Block, element: u32) -> u32 {
    return block.offset + element / block.columns * block.stride + element % block.columns;
}

fn gradient_at(i: u32) -> f32 {
//#if GRADIENT_HALVES
    let word = gradient[i / 2u];
    return bitcast<f32>(select(word & 0xffff0000u, word << 16u, i % 2u == 0u));
//#else
    return gradient[i];
//#endif
}

// The new moments of four elements; zeros past the tensor's end.
fn moments(block: Block, quad: u32) -> Moments {
    let element = block.element + 4u * quad;
    var m_old: vec4<f32>;
    var v_old: vec4<f32>;
    if (block.in_codes) {
        m_old = of_codes(m[block.at + quad], 0u, block.m_scale);
        v_old = of_codes(v[block.at + quad], OF_V, block.v_scale);
    } else {
        let first = block.at + 4u * quad;
        //#unroll i 4: m_old[$i] = bitcast<f32>(m[first + $iu]);
        //#unroll i 4: v_old[$i] = bitcast<f32>(v[first + $iu]);
    }
    var g = vec4<f32>(0.0);
    //#unroll i 4: if (element + $iu < block.elements) { g[$i] = stats[3] * gradient_at(place(block, element + $iu)); }
    let inside = vec4<u32>(element) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(block.elements);
    let zero = vec4<f32>(0.0);
    return Moments(
        select(zero, params.beta1 * m_old + params.one_minus_beta1 * g, inside),
        select(zero, params.beta2 * v_old + params.one_minus_beta2 * g * g, inside),
    );
}

// The code of the nearest value: as many as there are middles of two below x.
fn nearest(x: f32, first: u32) -> u32 {
    var code = 0u;
    for (var step = 128u; step > 0u; step /= 2u) {
        let next = first + code + step;
        if (0.5 * (value(next - 1u) + value(next)) < x) {
            code += step;
        }
    }
    return code;
}

fn code_of_m(x: f32, scale: f32) -> u32 {
    if (scale == 0.0) {
        return 0u;
    }
    let code = nearest(x / scale, 0u);
    return code - u32(x < 0.0 && value(code) == 0.0);
}

fn code_of_v(x: f32, scale: f32) -> u32 {
    if (scale == 0.0) {
        return 0u;
    }
    return nearest(x / scale, OF_V);
}

fn update(i: u32, m_new: f32, v_new: f32) {
    let lr = select(step_info[3], step_info[0], i < params.split);
    let denominator = sqrt(v_new) / step_info[2] + params.epsilon;
    p[i] = p[i] * (1.0 - lr * params.weight_decay) - (lr / step_info[1]) * m_new / denominator;
}

fn keep(block: Block, quad: u32, now: Moments, m_scale: f32, v_scale: f32) {
    let element = block.element + 4u * quad;
    if (block.in_codes) {
        var m_word = 0u;
        var v_word = 0u;
        //#unroll i 4
            if (element + $iu < block.elements) {
                m_word |= code_of_m(now.m[$i], m_scale) << (8u * $iu);
                v_word |= code_of_v(now.v[$i], v_scale) << (8u * $iu);
            }
        //#end
        m[block.at + quad] = m_word;
        v[block.at + quad] = v_word;
        if (quad == 0u) {
            m[block.at + QUADS] = bitcast<u32>(m_scale);
            v[block.at + QUADS] = bitcast<u32>(v_scale);
        }
    } else {
        let first = block.at + 4u * quad;
        //#unroll i 4: m[first + $iu] = bitcast<u32>(now.m[$i]);
        //#unroll i 4: v[first + $iu] = bitcast<u32>(now.v[$i]);
    }
    //#unroll i 4: if (element + $iu < block.elements) { update(place(block, element + $iu), now.m[$i], now.v[$i]); }
}

fn largest_of(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

@compute @workgroup_size(THREADS, ROWS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let block = find_block(group.x * ROWS + local.y);
    let quads = select(0u, QUADS, block.elements > 0u);
    var m_largest = 0.0;
    var v_largest = 0.0;
    for (var quad = local.x; quad < quads; quad += THREADS) {
        let now = moments(block, quad);
        m_largest = max(m_largest, largest_of(abs(now.m)));
        v_largest = max(v_largest, largest_of(now.v));
    }
    m_largest = reduce_max(m_largest, local.x);
    v_largest = reduce_max(v_largest, local.x);
//#if !ONE_THREAD
    // All have read the block's scales before one overwrites them.
    storageBarrier();
//#endif
    for (var quad = local.x; quad < quads; quad += THREADS) {
        if (stats[3] != 0.0) {
            keep(block, quad, moments(block, quad), m_largest, v_largest);
        }
//#if !GRADIENT_HALVES
        let element = block.element + 4u * quad;
        //#unroll i 4: if (element + $iu < block.elements) { gradient[place(block, element + $iu)] = 0.0; }
//#endif
    }
}
