"""The preprocessor, and what it reads off a shader."""

import struct

import pytest

from qlora_wgpu.gpu import wgsl
from qlora_wgpu.gpu.wgsl import ShaderSourceError, load_shader

HEAD = "@group(0) @binding(1) var<storage, read> x: array<f32>;\n"
MAIN = "@compute @workgroup_size(WG, 2)\nfn main() {}\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(wgsl, "shader_folder", lambda: tmp_path)
    load_shader.cache_clear()
    yield lambda name, text: (tmp_path / name).write_text(text)
    load_shader.cache_clear()


def load(**constants):
    return load_shader("a.wgsl", tuple(sorted({"WG": 8, **constants}.items())))


def test_conditions_blank_lines_and_keep_numbers(write):
    write("a.wgsl", HEAD + "//#if A\nyes\n//#else\nno\n//#endif\n//#if !A\nnot\n//#endif\n" + MAIN)
    lines = load(A=True).code.splitlines()
    assert lines[2] == "yes" and lines[4] == "" and "not" not in lines
    assert load(A=False).code.splitlines()[4] == "no"


def test_unroll_stays_on_its_line(write):
    write("a.wgsl", HEAD + "  //#unroll i 2, j N: a_$i_$j = $iu;\n" + MAIN)
    line = load(N=2).code.splitlines()[1]
    assert line == "  a_0_0 = 0u; a_0_1 = 0u; a_1_0 = 1u; a_1_1 = 1u;"


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
        ("//#unroll i NOPE: x", "is not a known integer"),
        ("//#unroll i 2: $k", "unknown counter"),
        ("//#unroll i", "expected"),
        ("//#endif", "without //#if"),
        ("//#if A", "without //#endif"),
        ("//#frobnicate", "unknown directive"),
        ("//#include gone.wgsl", "cannot be read"),
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
        + "@group(0) @binding(4) var<storage, read_write> y: array<f32>;\n"
        + MAIN,
    )
    shader = load(F=0.5, B=True)
    assert {n: b.writable for n, b in shader.bindings.items()} == {"x": False, "y": True}
    assert shader.workgroup_size == (8, 2, 1)
    assert shader.pack_params({"n": 3, "s": 0.5}) == struct.pack("<If", 3, 0.5) + bytes(8)
    for wrong in ({"n": 3}, {"n": 3, "s": 1.0, "z": 1}):
        with pytest.raises(ShaderSourceError, match="missing or unknown"):
            shader.pack_params(wrong)
    assert "const B = true;" in shader.code and "const F = f32(0.5);" in shader.code
