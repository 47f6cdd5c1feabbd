"""Arrays that are mapped from files: their pages, their pieces, and files that became shorter."""

import hashlib
import mmap
from types import SimpleNamespace

import numpy as np
import pytest

from qlora_wgpu import mapped_files
from qlora_wgpu.errors import WeightFileError

NUMBERS = np.arange(3 * mmap.PAGESIZE // 4, dtype=np.int32)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "numbers").write_bytes(NUMBERS.tobytes())
    return tmp_path / "numbers"


@pytest.fixture
def mapped(path):
    with path.open("rb") as file:
        return mapped_files.map_file(path, file).view(np.int32)


def test_a_mapped_array_is_told_from_others(path, mapped):
    assert (mapped == NUMBERS).all() and not isinstance(mapped, np.memmap)
    assert mapped_files.is_mapped(mapped[5:9]) and not mapped_files.is_mapped(NUMBERS)
    assert mapped_files.path_of(mapped[5:9].reshape(2, 2)) == str(path)
    assert mapped_files.path_of(NUMBERS) is None
    with path.open("rb") as file:  # by somebody else
        assert mapped_files.path_of(np.memmap(file, np.uint8, "r")) is None
        assert (mapped_files.map_file(path, file, 8).view(np.int32) == NUMBERS[2:]).all()


def test_listeners_hear_of_files_and_their_sizes(path, monkeypatch):
    heard = []
    monkeypatch.setattr(mapped_files, "map_listeners", [lambda *given: heard.append(given)])
    with path.open("rb") as file:
        mapped_files.map_file(path, file, 4096)
    assert heard == [(str(path), NUMBERS.nbytes)]


@pytest.mark.parametrize(("kept", "fails"), [(NUMBERS.nbytes, False), (NUMBERS.nbytes - 1, True)])
def test_a_file_that_became_shorter_is_found(path, mapped, kept, fails):
    mapped_files.check_not_truncated(NUMBERS)
    with path.open("r+b") as file:
        file.truncate(kept)
        mapped_files.check_not_truncated(np.memmap(file, np.uint8, "r"))
    if not fails:
        mapped_files.check_not_truncated(mapped[3:])
        return
    with pytest.raises(WeightFileError, match="numbers"):
        mapped_files.check_not_truncated(mapped[3:])
    with pytest.raises(WeightFileError):
        next(mapped_files.pieces(mapped, 5))


@pytest.mark.parametrize("size", [1000, len(NUMBERS) // 3, len(NUMBERS), len(NUMBERS) + 1])
def test_pieces_are_all_of_an_array_in_order(mapped, size):
    made = list(mapped_files.pieces(mapped.reshape(3, -1), size))
    assert [len(each) for each in made[:-1]] == [size] * (len(made) - 1)
    assert 0 < len(made[-1]) <= size and (np.concatenate(made) == NUMBERS).all()


def test_a_hash_is_that_of_the_bytes_with_what_comes_before(mapped, monkeypatch):
    monkeypatch.setattr(mapped_files, "_HASH_BYTES", 1000)
    expected = hashlib.sha256(b"before" + NUMBERS.tobytes()).hexdigest()
    assert mapped_files.sha256(mapped.view(np.uint8), b"before").hexdigest() == expected
    assert mapped_files.sha256(NUMBERS.view(np.uint8)[:0]).hexdigest() == (
        hashlib.sha256().hexdigest()
    )


def test_every_page_is_read(mapped):
    read = []

    class Noted(np.ndarray):
        def __getitem__(self, key):
            read.append((len(self), key))
            return super().__getitem__(key)

    mapped_files.read_now(mapped.view(Noted))
    assert read[-1] == (NUMBERS.nbytes, slice(None, None, mmap.PAGESIZE))


class Noting:
    """In place of a mapping, which notes what it is advised of."""

    def __init__(self, nbytes):
        self.base = np.zeros(nbytes, np.uint8)
        self.told = []

    def madvise(self, *given):
        self.told.append(given)


@pytest.mark.parametrize(("first", "last", "begin", "length"), [
    (0, 10, 0, 10), (mmap.PAGESIZE, mmap.PAGESIZE + 10, mmap.PAGESIZE, 10),
    (mmap.PAGESIZE + 8, 2 * mmap.PAGESIZE, mmap.PAGESIZE, mmap.PAGESIZE),
    (mmap.PAGESIZE - 8, 2 * mmap.PAGESIZE, 0, 2 * mmap.PAGESIZE),
])  # fmt: skip
@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="the system does not know it")
@pytest.mark.parametrize("how", ["prefetch", "release_pages"])
def test_whole_pages_around_an_array_are_advised(monkeypatch, first, last, begin, length, how):
    mapping = Noting(4 * mmap.PAGESIZE)
    monkeypatch.setattr(mapped_files, "_map_of", lambda array: mapping)
    given = SimpleNamespace(
        frombuffer=lambda mapped, dtype: mapped.base, ndarray=np.ndarray, uint8=np.uint8
    )
    monkeypatch.setattr(mapped_files, "np", given)
    getattr(mapped_files, how)(mapping.base[first:last])
    name = {"prefetch": "MADV_WILLNEED", "release_pages": "MADV_DONTNEED"}[how]
    assert mapping.told == [(getattr(mmap, name), begin, length)]
    getattr(mapped_files, how)(mapping.base[:0])
    assert len(mapping.told) == 1


def test_arrays_in_memory_are_not_advised():
    mapped_files.prefetch(NUMBERS)
    mapped_files.release_pages(NUMBERS)
