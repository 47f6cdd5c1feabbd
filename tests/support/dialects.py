"""Files of other trainers, and what becomes of them."""

import json

from qlora_wgpu import load_config
from qlora_wgpu.config.dialects.conversion import convert_file
from qlora_wgpu.config.yaml import read_yaml_file


def converted(place, name, changes=None, given=None, layers=2):
    """The configuration that a file becomes, with some of its keys changed."""
    values = {**read_yaml_file(place / name).values, **(changes or {})}
    values = {key: value for key, value in values.items() if value != "LEAVE OUT"}
    (place / "theirs.json").write_text(json.dumps(values))
    conversion = convert_file(place / "theirs.json", given or {}, lambda model: layers)
    (place / "run.yaml").write_text(conversion.text())
    return load_config(place / "run.yaml"), conversion


def reasons_of(conversion):
    return {left.key: left.reason for left in conversion.dropped}
