"""Settings that a Python call gives beside a configuration: by key, dotted key or section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qlora_wgpu.config.problems import shown
from qlora_wgpu.config.renamed import new_name
from qlora_wgpu.config.schema import sections
from qlora_wgpu.config.suggestions import suggest_key
from qlora_wgpu.errors import ConfigError

Location = tuple[str, str]


def located(settings: Mapping[str, Any]) -> dict[Location, Any]:
    """Values by section and key.

    Args:
        settings: By key where one section alone has it (``learning_rate=1e-4``), by dotted key
            (``{"optim.learning_rate": 1e-4}``), or by section (``optim={"learning_rate": 1e-4}``).

    Raises:
        ConfigError: If a key is unknown, stands in several sections, or is given twice.
    """
    values: dict[Location, Any] = {}
    for name, value in settings.items():
        for location, part in _parts(name, value):
            if location in values:
                raise ConfigError(f"{'.'.join(location)} is given twice: give it once")
            values[location] = part
    return values


def _parts(name: str, value: Any) -> Iterator[tuple[Location, Any]]:
    """The settings that one argument stands for."""
    section, dot, key = name.partition(".")
    if dot:
        yield _known(section, key), value
    elif name == "device" and isinstance(value, str | int) and not isinstance(value, bool):
        yield ("device", "gpu"), str(value)  # as from_pretrained takes it
    elif name in sections() and isinstance(value, Mapping):
        for inner, part in value.items():
            yield _known(name, str(inner)), part
    else:
        yield _alone(name, value), value


def _known(section: str, key: str) -> Location:
    key = new_name(section, key)
    if key not in sections().get(section, ()):
        location = (section, key) if section in sections() else (f"{section}.{key}",)
        raise ConfigError(f"there is no setting '{section}.{key}'{suggest_key(location)}")
    return section, key


def _alone(name: str, value: Any) -> Location:
    """The section of a key that stands by itself."""
    homes = [section for section, keys in sections().items() if name in keys]
    if len(homes) > 1:
        dotted = " or ".join(f"'{section}.{name}'" for section in homes)
        raise ConfigError(f"several sections have a setting '{name}': write {dotted}")
    if homes:
        return homes[0], name
    if name in sections():
        keys = sections()[name]
        raise ConfigError(
            f"'{name}' is a section: give its settings as a mapping such as "
            f"{{'{keys[0]}': ...}}, got {shown(value)}"
        )
    raise ConfigError(f"there is no setting '{name}'{suggest_key((name,))}")
