"""Files of a site: of bounded size, and what is the same lies once."""

import gzip
import hashlib
import json

import numpy as np

from qlora_wgpu.web.variant import SiteFiles, WeightFiles


def test_weights_lie_in_files_of_bounded_size_and_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr("qlora_wgpu.web.variant.FILE_BYTES", 16)
    rng, files = np.random.default_rng(1), SiteFiles(tmp_path)
    weights, arrays = WeightFiles(files), [rng.integers(0, 256, n, np.uint8) for n in (6, 37, 5)]
    places = [weights.put(array) for array in (*arrays, arrays[1].copy())]
    names = weights.end()
    assert places[1] == places[3] and names == [f"weights/{n:03d}.bin" for n in range(len(names))]
    content = [(tmp_path / name).read_bytes() for name in names]
    assert all(len(each) <= 16 for each in content) and len(b"".join(content)) <= 8 + 40 + 8
    for array, place in zip(arrays, places, strict=False):
        found = b"".join(content[file][first : first + size] for file, first, size in place)
        assert found == array.tobytes() and all(first % 4 == 0 for _, first, _ in place)
    for name, each in zip(names, content, strict=True):
        digest = hashlib.sha256(each).hexdigest()
        assert files.listed[name] == {"bytes": len(each), "sha256": digest}


def test_json_is_packed_and_alike_whenever_it_is_written(tmp_path):
    files = SiteFiles(tmp_path)
    assert files.put_json("a/plan", {"b": [1, 2]}) == "a/plan"
    packed = (tmp_path / "a/plan").read_bytes()
    assert json.loads(gzip.decompress(packed)) == {"b": [1, 2]}
    assert packed[4:8] == bytes(4) and files.listed["a/plan"]["bytes"] == len(packed)


def test_without_weights_there_are_no_files(tmp_path):
    assert WeightFiles(SiteFiles(tmp_path)).end() == [] and not list(tmp_path.iterdir())
