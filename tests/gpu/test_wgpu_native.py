"""What is changed of wgpu-py and cffi, by private names."""

import pytest
from cffi import FFI, CDefError

from qlora_wgpu.gpu import wgpu_native


@pytest.fixture
def ffi():
    """Types of every kind, one of them a struct of the others."""
    made = FFI()
    made.cdef("""
        typedef struct HandleImpl* Handle;
        typedef enum Kind { Kind_A = 0, Kind_B = 7 } Kind;
        typedef struct View { char const * data; size_t length; } View;
        typedef struct Info { View name; Kind kind; Handle * handles; uint64_t flags; } Info;
        int call(Info * info);
    """)
    return made


TEXTS = ["Info *", "Info", "Handle[]", "Handle const *", "View *", "Kind", "uint8_t []", "char []",
         "uintptr_t", "struct View *", "void(Kind, View, Handle const *, void *)"]  # fmt: skip


def type_of(ffi, text):
    return ffi.typeof(f"{text.replace('void(', 'void(*)(')}")


def test_types_are_what_they_were(ffi):
    other = FFI()
    other.cdef(ffi._cdefsources[0])
    wgpu_native._parse_types_by_what_they_name(ffi)
    for text in TEXTS:
        own, its = type_of(ffi, text), type_of(other, text)
        assert str(own) == str(its)
        if own.kind == "struct":
            assert [(n, f.offset) for n, f in own.fields] == [(n, f.offset) for n, f in its.fields]
    info = ffi.new("Info *", {"kind": 7, "flags": 1 << 40})
    assert (info.kind, info.flags, ffi.sizeof("Info")) == (7, 1 << 40, other.sizeof("Info"))


def test_declarations_are_all_there_afterwards(ffi):
    wgpu_native._parse_types_by_what_they_name(ffi)
    before = dict(ffi._parser._declarations)
    with pytest.raises(CDefError):
        ffi.typeof("Unknown *")
    ffi.typeof("View *")
    assert ffi._parser._declarations == before
    ffi.cdef("typedef struct { Info info; } Later;")
    assert ffi.typeof("Later *").item.fields[0][1].type is ffi.typeof("Info")


def test_only_what_is_named_is_parsed(ffi, monkeypatch):
    parsed = []
    original = type(ffi._parser)._parse

    def noted(parser, text):
        parsed.append({name for name in parser._declarations if name.startswith("typedef ")})
        return original(parser, text)

    monkeypatch.setattr(type(ffi._parser), "_parse", noted)
    wgpu_native._parse_types_by_what_they_name(ffi)
    ffi.typeof("void(*)(View, Kind)")
    assert parsed == [{"typedef View", "typedef Kind"}]


def test_it_is_done_to_wgpu(device):
    if device.backend.name == "wgpu":
        ffi = device.backend.module.backends.wgpu_native.ffi
        assert "parse_type" in vars(ffi._parser)
