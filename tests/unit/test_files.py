"""The one door for reading files, and that there is no other."""

import ast
import os
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from support.pipes import make_pipe
from support.processes import PATIENCE

import qlora_wgpu
from qlora_wgpu.files import file_bytes, file_text, open_file

ROOT = Path(qlora_wgpu.__file__).parent
PROJECT = Path(__file__).parents[2]
PROGRAMS = ("benchmarks", "demo", "docs", "examples", "tools")

# Where files are opened by other means: the door, and what writes.
# The last are files of its own, which it has just made, the device that holds nothing, and files
# of the system's own, which a supervisor asks for its limits.
DOORS = {
    "files.py",
    "checkpoint/atomic.py",
    "supervision/child.py",
    "sandbox/process.py",
    "grpo/reward_process.py",
    "supervision/streams.py",
    "supervision/processes.py",
}
READERS = {"read_text", "read_bytes", "fromfile", "from_file", "loadtxt", "genfromtxt", "load_file"}


def test_regular_files_and_links_to_them(tmp_path: Path) -> None:
    blob, link = tmp_path / "blob", tmp_path / "link"
    blob.write_bytes(b"a\r\nb")
    link.symlink_to(blob)  # as the hub's cache has it
    assert file_bytes(link, 4) == b"a\r\nb"
    assert file_text(link, 4) == "a\nb"
    with open_file(link) as file:
        assert file.read(1) == b"a"


def test_a_small_file_takes_little_memory_whatever_it_may_have(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(bytes(1000))
    tracemalloc.start()
    try:
        assert len(file_bytes(path, 1 << 30)) == 1000
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_files_that_tell_no_size() -> None:
    whole = Path("/proc/self/limits").read_bytes()
    assert Path("/proc/self/limits").stat().st_size == 0
    assert file_bytes("/proc/self/limits", 1 << 20) == whole
    with pytest.raises(OSError, match="too large"):
        file_bytes("/proc/self/limits", len(whole) - 1)


def test_what_is_larger_than_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(5))
    with pytest.raises(OSError, match="too large: such a file may have at most 4 bytes"):
        file_bytes(path, 4)
    assert len(file_bytes(path, 5)) == 5
    assert b"Linux" in file_bytes("/proc/version", 2000)  # says that it has no bytes, but has
    with pytest.raises(OSError, match="too large"):
        file_bytes("/proc/version", 3)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """In a process of its own, because a pipe would block this one for ever."""
    make_pipe(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(tmp_path)  # a socket's path is a short one
        try:
            listener.bind("socket")
        finally:
            os.chdir(here)
        for name in ("zero", "null", "tty"):
            (tmp_path / name).symlink_to(f"/dev/{name}")
        (tmp_path / "round").symlink_to("round")
        (tmp_path / "nothing").symlink_to("gone")
        (tmp_path / "folder").mkdir()
        code = (
            "import sys\nfrom qlora_wgpu.files import file_bytes\n"
            "for name in sys.argv[1:]:\n"
            "    try:\n        file_bytes(name, 10**12)\n"
            "    except OSError as err:\n        print(name, err.strerror)\n"
        )
        names = ["pipe", "socket", "zero", "null", "tty", "round", "nothing", "folder"]
        run = subprocess.run(
            [sys.executable, "-c", code, *names],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert run.stdout.splitlines() == [
        "pipe it is a named pipe, not a regular file",
        "socket it is a socket, not a regular file",
        "zero it is a device, not a regular file",
        "null it is a device, not a regular file",
        "tty it is a device, not a regular file",
        "round Too many levels of symbolic links",
        "nothing No such file or directory",
        "folder Is a directory",
    ]


def opens(path: Path) -> list[str]:
    """The lines of a module that open a file for reading by themselves."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _reads(node)
    ]


def _reads(call: ast.Call) -> bool:
    match call.args:
        case [ast.Call(ast.Attribute(ast.Name("io"), "BytesIO")), *_]:  # bytes, and no file
            return False
    match call.func:
        case ast.Attribute(ast.Name("np"), "load" | "memmap"):  # of a file that is open already
            return not (isinstance(call.args[0], ast.Name) and call.args[0].id == "file")
        case ast.Attribute(ast.Name("os"), "open"):
            return "O_WRONLY" not in ast.unparse(call)
        case ast.Attribute(_, name) if name in READERS:
            return True
        case ast.Name("open"):
            return not _writes(call.args[1:])
        case ast.Attribute(_, "open"):
            # ModelFolder.open(path) and its like take one thing, which is no mode.
            modes = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
            constants = [
                a for a in modes if isinstance(a, ast.Constant) and isinstance(a.value, str)
            ]
            keywords = {k.arg for k in call.keywords}
            return not _writes(modes) and bool(constants or keywords or not modes)
    return False


def _writes(arguments: list[ast.expr]) -> bool:
    return any(
        isinstance(a, ast.Constant) and isinstance(a.value, str) and set(a.value) & set("wax+")
        for a in arguments
    )


@pytest.mark.slow
def test_every_file_is_read_through_the_door() -> None:
    modules = [p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).as_posix() not in DOORS]
    assert [line for path in modules for line in opens(path)] == []


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("path.open()", True),
        ("path.open('rb')", True),
        ("path.open(encoding='utf-8')", True),
        ("open(path)", True),
        ("path.read_text(encoding='utf-8')", True),
        ("path.read_bytes()", True),
        ("np.memmap(path, dtype)", True),
        ("os.open(path, os.O_RDONLY)", True),
        ("Image.open(path, formats=FORMATS)", True),
        ("Image.open(io.BytesIO(content), formats=FORMATS)", False),
        ("path.open('wb')", False),
        ("open(path, 'w')", False),
        ("ModelFolder.open(path)", False),
        ("np.memmap(file, dtype)", False),
    ],
)
def test_the_rule_sees_what_reads(code: str, reads: bool) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call) and _reads(call) == reads


def _leaves_to_the_locale(call: ast.Call) -> bool:
    """Whether what text is encoded in is said by the locale, not by the code."""
    given = {word.arg: word.value for word in call.keywords}
    if "encoding" in given:
        return False
    match call.func:
        case ast.Attribute(_, "read_text"):
            return not call.args
        case ast.Attribute(_, "write_text"):
            return len(call.args) < 2
        case ast.Attribute(_, "run" | "Popen" | "check_output"):
            return bool({"text", "universal_newlines"} & given.keys())
        case ast.Name("open"):
            modes = call.args[1:2]
        case ast.Attribute(ast.Name("os"), "open"):  # of bytes
            return False
        case ast.Attribute(_, "open"):
            modes = call.args[:1]
        case _:
            return False
    match given.get("mode") or next(iter(modes), None):
        case ast.Constant(str(mode)):
            return "b" not in mode
        case mode:  # the first argument of what is no file's open is none
            return mode is None and isinstance(call.func, ast.Name)


@pytest.mark.slow
def test_no_text_depends_on_the_locale() -> None:
    found = [
        f"{path}:{node.lineno}"
        for folder in (ROOT, *(PROJECT / name for name in PROGRAMS))
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and _leaves_to_the_locale(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "leaves"),
    [
        ("path.read_text()", True),
        ("path.write_text(text)", True),
        ("path.open('w')", True),
        ("open(path)", True),
        ("open(path, mode='a')", True),
        ("subprocess.run(command, text=True)", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, 'utf-8')", False),
        ("path.open('w', encoding='utf-8')", False),
        ("open(path, 'rb')", False),
        ("path.open('xb')", False),
        ("os.open('/dev/tty', os.O_RDWR)", False),
        ("subprocess.run(command)", False),
        ("ModelFolder.open(path)", False),
    ],
)
def test_the_rule_sees_what_the_locale_says(code: str, leaves: bool) -> None:
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call) and _leaves_to_the_locale(call) == leaves


@pytest.mark.skipif(os.name == "nt", reason="there are no such files")
def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/null"):
        with pytest.raises(OSError, match="not a regular file"):
            file_bytes(path, 100)
    with pytest.raises(IsADirectoryError):
        file_bytes(tmp_path, 100)
