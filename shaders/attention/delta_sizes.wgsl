// attention/delta.wgsl for kernels in f16, which have to know how large things are: behind the pairs
// lse_delta has (the largest |do|, the largest |v|), of what is finite, per block of SIZED rows of a
// sequence and head of q, heads of a sequence one after another. The first has a minus sign, also at
// 0, where a pair is not finite.
//
// v (rows, heads / group · head_dim); heads are UNITS units of eight. A workgroup takes a block of
// one head. Launcher: kernels/attention/matrix_units.py.
struct Params {
    rows: u32, //= o.rows
    seq: u32,
    heads: u32,
    group: u32,
    stride: u32, //= o.stride
    kv_stride: u32, //= v.stride
}

@group(0) @binding(0) var<uniform> params: Params;
//#input 1 o: 8
//#input 2 dout: 8
@group(0) @binding(3) var<storage, read> lse: array<f32>;
@group(0) @binding(4) var<storage, read_write> lse_delta: array<vec2<f32>>;
//#input 5 v: 8

var<workgroup> largest: array<vec3<f32>, SIZED>; // and 1 where a pair is not finite

fn finite4(v: vec4<f32>) -> vec4<f32> {
    let size = abs(v);
    return select(vec4<f32>(0.0), size, bitcast<vec4<u32>>(size) < vec4<u32>(0x7f800000u));
}

fn is_finite(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u;
}

fn largest8(v: Eight) -> f32 {
    let size = max(finite4(v.even), finite4(v.odd));
    return max(max(size.x, size.y), max(size.z, size.w));
}

@compute @workgroup_size(SIZED)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
    let in_sequence = group.x * SIZED + index;
    var size = vec3<f32>(0.0);
    if (in_sequence < params.seq) {
        let row = group.z * params.seq + in_sequence;
        let at = row * params.stride + group.y * UNITS;
        let v_at = row * params.kv_stride + group.y / params.group * UNITS;
        var sum = 0.0;
        for (var unit = 0u; unit < UNITS; unit += 1u) {
            let dout = load_dout(at + unit);
            sum += dot8(load_o(at + unit), dout);
            size = max(size, vec3<f32>(largest8(dout), largest8(load_v(v_at + unit)), 0.0));
        }
        let i = row * params.heads + group.y;
        lse_delta[i] = vec2<f32>(lse[i], sum);
        size.z = select(1.0, 0.0, is_finite(lse[i]) && is_finite(sum));
    }
    largest[index] = size;
    workgroupBarrier();
    for (var half = SIZED / 2u; half > 0u; half /= 2u) {
        if (index < half) {
            largest[index] = max(largest[index], largest[index + half]);
        }
        workgroupBarrier();
    }
    if (index == 0u) {
        let blocks = (params.seq + SIZED - 1u) / SIZED;
        let signed = bitcast<f32>(bitcast<u32>(largest[0].x) | select(0u, 0x80000000u, largest[0].z == 1.0));
        lse_delta[params.rows * params.heads + (group.z * params.heads + group.y) * blocks + group.x] = vec2<f32>(signed, largest[0].y);
    }
}
