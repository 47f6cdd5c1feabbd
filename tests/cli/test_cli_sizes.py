"""Sizes as users write them: GB is not GiB."""

import pytest

from qlora_wgpu.cli._options import read_bytes
from qlora_wgpu.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8GiB", 8 * 2**30),
        ("8Gi", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8G", 8 * 10**9),
        (" 1.5 mib ", 3 * 2**19),
        ("500kB", 500_000),
        ("2k", 2000),
        ("2TiB", 2 * 2**40),
        ("1024", 1024),
        ("7b", 7),
    ],
)
def test_units(text, expected):
    assert read_bytes("--budget", text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "3x", "-1GiB", "8GiB or so", "8GiB!", "1e3", "1.2.3G", "nan", "8Gbit", "8"]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"--budget must be a size such as 8GiB") as refusal:
        read_bytes("--budget", text)
    assert repr(text) in str(refusal.value)
