"""The preprocessor, typed operands, and what is read off a shader."""

import re
import struct

import pytest

from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.operands import Bound
from qlora_wgpu.gpu.wgsl import ShaderSourceError, load_shader
from qlora_wgpu.graph.launch import Launch
from qlora_wgpu.graph.tensor import matrix

HEAD = "@group(0) @binding(1) var<storage, read> x: array<f32>;\n"
MAIN = "@compute @workgroup_size(WG, 2)\nfn main() {}\n"
PARAMS = "struct Params {\n    n: u32,\n}\n@group(0) @binding(0) var<uniform> params: Params;\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    folder = wgsl.shader_folder()
    monkeypatch.setattr(wgsl, "shader_folder", lambda: tmp_path)
    (tmp_path / "common").mkdir()
    for name in ("eight", "texel", "bfloat16"):
        source = folder / "common" / f"{name}.wgsl"
        (tmp_path / "common" / source.name).write_text(source.read_text())

    def clear():
        load_shader.cache_clear()
        wgsl.shader_source.cache_clear()

    def written(name, text):
        (tmp_path / name).write_text(text)
        clear()

    clear()
    yield written
    clear()


def load(bound=None, **constants):
    shown = {name: Bound(*what) for name, what in (bound or {}).items()}
    return load_shader(
        "a.wgsl", tuple(sorted({"WG": 8, **constants}.items())), tuple(sorted(shown.items()))
    )


def test_conditions_blank_lines_and_keep_numbers(write):
    write("a.wgsl", HEAD + "//#if A\nyes\n//#else\nno\n//#endif\n//#if !A\nnot\n//#endif\n" + MAIN)
    lines = load(A=True).code.splitlines()
    assert lines[2] == "yes" and lines[4] == "" and "not" not in lines
    assert load(A=False).code.splitlines()[4] == "no"


def test_a_boolean_with_a_question_mark_is_false_unless_given(write):
    write("a.wgsl", HEAD + "//#if A?\nyes\n//#else\nno\n//#endif\n" + MAIN)
    assert load().code.splitlines()[4] == "no"
    assert load(A=True).code.splitlines()[2] == "yes"


def test_conditions_ask_what_is_bound(write):
    write("a.wgsl", "//#if y\nyes\n//#input 2 y: 4\n//#else\nno\n//#endif\n" + HEAD + MAIN)
    assert "yes" in load({"y": ("float32",)}).code
    assert "no" in load().code.splitlines()


def test_unroll_stays_on_its_line(write):
    write("a.wgsl", HEAD + "  //#unroll i 2, j N: a_$i_$j = $iu;\n" + MAIN)
    line = load(N=2).code.splitlines()[1]
    assert line == "  a_0_0 = 0u; a_0_1 = 0u; a_1_0 = 1u; a_1_1 = 1u;"


def test_blocks_unroll_inside_out_and_keep_numbers(write):
    block = "//#unroll i N\n  a_$i = 1; // why\n  //#unroll j 2: b_$i_$j = 2;\n//#end\n"
    write("a.wgsl", HEAD + block + "after\n" + MAIN)
    lines = load(N=2).code.splitlines()
    assert lines[4] == "a_0 = 1; b_0_0 = 2; b_0_1 = 2; a_1 = 1; b_1_0 = 2; b_1_1 = 2;"
    assert lines[5] == "after" and not any(lines[1:4])


def test_includes_come_once(write):
    write("b.wgsl", "fn b() {}\n//#include c.wgsl\n")
    write("c.wgsl", "fn c() {}\n")
    write("a.wgsl", "//#include b.wgsl\n//#include c.wgsl\n" + HEAD + MAIN)
    code = load().code
    assert code.count("fn b()") == 1 and code.count("fn c()") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("//#if NOPE\n//#endif", "NOPE is not a known boolean"),
        ("//#if WG\n//#endif", "WG is not a known boolean"),
        ("//#if nope\n//#endif", "nope is not a binding"),
        ("//#unroll i NOPE: x", "is not a known integer"),
        ("//#unroll i 2: $k", "unknown counter"),
        ("//#unroll i 2\nx", "without //#end"),
        ("//#end", "without //#unroll"),
        ("//#endif", "without //#if"),
        ("//#if A", "without //#endif"),
        ("//#frobnicate", "unknown directive"),
        ("//#include gone.wgsl", "cannot read shader"),
        ("//#input 2 y: 3", "does not declare an operand"),
        ("//#output 2 y: 4 fast", "does not declare an operand"),
        ("//#input 2 y: 4\n//#output 3 y: 4", "declared twice"),
        ("//#input 1 y: 4", "have the same index"),
    ],
)
def test_mistakes_are_errors(write, line, message):
    write("a.wgsl", HEAD + line + "\n" + MAIN)
    with pytest.raises(ShaderSourceError, match=message):
        load(A=True)


def test_bindings_params_and_workgroup_size(write):
    write(
        "a.wgsl",
        "struct Params { n: u32, s: f32 }\n"
        "@group(0) @binding(0) var<uniform> params: Params;\n"
        "// @group(0) @binding(9) var<storage, read> ghost: array<f32>;\n"
        + HEAD
        + "@group(0) @binding(4) var<storage, read_write> y: array<u32>;\n"
        + MAIN,
    )
    shader = load(F=0.5, B=True)
    assert {n: b.writable for n, b in shader.bindings.items()} == {"x": False, "y": True}
    assert shader.bindings["x"].dtypes == {"float32"}  # a plain array takes float32 alone
    assert shader.bindings["y"].dtypes == {"uint32", "uint8"}
    assert shader.workgroup_size == (8, 2, 1)
    assert shader.pack_params({"n": 3, "s": 0.5}) == struct.pack("<If", 3, 0.5) + bytes(8)
    for wrong in ({"n": 3}, {"n": 3, "s": 1.0, "z": 1}):
        with pytest.raises(ShaderSourceError, match="missing or unknown"):
            shader.pack_params(wrong)
    assert "const B = true;" in shader.code and "const F = f32(0.5);" in shader.code


@pytest.mark.parametrize("width", ["8", "4", "2", "1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_input_is_declared_as_what_is_bound(write, width, dtype):
    write("a.wgsl", PARAMS + f"//#input 2 y: {width}\n" + HEAD + MAIN)
    buffer = load({"y": (dtype,)})
    assert buffer.bindings["y"].memory == "any" and not buffer.bindings["y"].texture
    assert "fn load_y(i: u32)" in buffer.code and [n for n, _ in buffer.params] == ["n"]
    texture = load({"y": (dtype, True)})
    assert texture.bindings["y"].texture and "texture_storage_2d<rgba32uint, read>" in texture.code
    # A window of a texture begins where the launch says.
    assert [n for n, _ in texture.params] == ["n", "first_texel_y"]
    assert texture.code.splitlines()[4] != ""  # the declaration stands where the directive stood


def test_outputs_say_what_memory_they_can_write(write):
    text = "//#output 2 a: 8\n//#output 3 b: 4\n//#output 4 c: 8 sum\n//#output 5 d: words\n"
    write("a.wgsl", PARAMS + text + HEAD + MAIN)
    bound = {"b": ("bfloat16",), "c": ("float32",)}
    bindings = load(bound, ACCUMULATE=True).bindings
    memories = {n: b.memory for n, b in bindings.items() if n != "x"}
    assert memories == {"a": "any", "b": "buffer", "c": "buffer", "d": "any"}
    # Four float32 are a texel, and what is added to nothing is as any output.
    bindings_of_sums = load({**bound, "b": ("float32",)}, ACCUMULATE=False).bindings
    assert {bindings_of_sums[n].memory for n in "bc"} == {"any"}
    assert bindings["c"].sums and bindings["d"].dtypes >= {"uint32", "bfloat16"}


def test_what_is_not_bound_reads_as_zero(write):
    write("a.wgsl", "//#input 2 y?: 4\n" + HEAD + MAIN)
    shader = load()
    assert shader.bindings["y"].optional
    assert "fn load_y(i: u32) -> vec4<f32> { return vec4<f32>(0.0); }" in shader.code
    assert "@binding(2)" not in shader.code
    write("a.wgsl", "//#input 2 y: 4\n" + HEAD + MAIN)  # a launch refuses to leave it out
    assert "@binding(2) var<storage, read> y: array<vec4<f32>>;" in load().code


def test_sums_add(write):
    write("a.wgsl", "//#output 2 y: 4 sum\n" + HEAD + MAIN)
    assert "y[i] = v" in load({"y": ("float32",)}, ACCUMULATE=False).code
    assert "y[i] += v" in load({"y": ("float32",)}, ACCUMULATE=True).code


def test_sums_of_textures_add_to_another_input(write):
    operands = "//#input 3 y_before?: 4 float32\n//#output 2 y: 4 sum\n"
    write("a.wgsl", PARAMS + operands + HEAD + MAIN)
    bound = {"y": ("float32", True), "y_before": ("float32", True)}
    shader = load(bound, ACCUMULATE=True)
    assert shader.bindings["y"].memory == "any"
    assert "let v = load_y_before(i) + added; textureStore(y, texel_at(i), " in shader.code
    assert "load_y_before(i) +" not in load(bound, ACCUMULATE=False).code


def test_every_broadcast_is_of_one_invocation(write):
    text = "//#input 2 y: 8\nfn f() {\n//#unroll s 2: let v_$s = broadcast_y_$s(load_y(0u));\n}\n"
    write("a.wgsl", text + HEAD + MAIN)
    code = load({"y": ("bfloat16",)}).code
    both = "Eight(subgroupBroadcast(v.even, 1u), subgroupBroadcast(v.odd, 1u))"
    assert f"fn broadcast_y_1(v: Eight) -> Eight {{ return {both}; }}" in code


def test_no_comment_counts_as_code(write):
    hidden = "/* @group(0) @binding(2) var<storage, read> y: array<f32>; */\n"
    comments = "// Eight texel_at(x) $i\n" + hidden
    write("a.wgsl", comments + HEAD + MAIN)
    shader = load()
    assert "struct Eight" not in shader.code and "fn texel_at" not in shader.code
    assert set(shader.bindings) == {"x"}
    assert shader.code.splitlines()[2] == HEAD.strip()


def test_no_name_is_one_that_direct3d_compilers_have(write):
    write("a.wgsl", HEAD + "//#output 2 dx: 8\nfn f() { store_dx(0u, zero8()); }\n" + MAIN)
    shader = load({"dx": ("float32",)})
    assert shader.bindings["dx"].index == 2 and "fn store_dx(" in shader.code
    # DXC has a namespace of that name, and naga strips underscores from a name's end.
    assert not re.search(r"\bdx_*\b", shader.code) and "x_gradient[i] = " in shader.code


SIZES = (
    "struct Params {\n    rows: u32, //= y.rows\n    all: u32, //= x.units\n"
    "    wide: u32, //= x.elements\n    x_stride: u32,\n    z_stride: u32,\n    n: u32,\n}\n"
    "@group(0) @binding(0) var<uniform> params: Params;\n"
    "//#input 1 x: 8\n//#output 2 y: words\n//#input 3 z?: 4\n"
)


def test_sizes_of_what_is_bound_need_no_launcher(write):
    write("a.wgsl", SIZES + MAIN)
    x, y = matrix("x", 3, 20, "bfloat16"), matrix("y", 5, 8, "uint32")
    launch = Launch("a.wgsl", {"x": x, "y": y}, {"n": 7}, {"WG": 8}, (1, 1, 1), "a", 0)
    assert struct.unpack("<6I8x", launch.params) == (5, 9, 24, 3, 0, 7)
    given = {"n": 7, "x_stride": 4}
    launch = Launch("a.wgsl", {"x": x, "y": y}, given, {"WG": 8}, (1, 1, 1), "a", 0)
    assert struct.unpack("<6I8x", launch.params)[3] == 4


@pytest.mark.parametrize("behind", ["x.length", "w.rows"])
def test_sizes_of_nothing_are_errors(write, behind):
    write("a.wgsl", SIZES.replace("y.rows", behind) + MAIN)
    with pytest.raises(ShaderSourceError, match=r"a\.wgsl:2: (expected|w is not a binding)"):
        load({"x": ("float32",), "y": ("float32",)})
