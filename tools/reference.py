"""Writes docs/configuration.md, docs/cli.md and the tables of docs/limits.md from the code.

usage: python tools/reference.py           writes all
       python tools/reference.py --check   fails if one is out of date
"""

from __future__ import annotations

import re
import sys
from copy import deepcopy
from pathlib import Path

import click
import yaml

from qlora_wgpu import limits
from qlora_wgpu.cli import commands
from qlora_wgpu.config import Config
from qlora_wgpu.config.section import summary

DOCS = Path(__file__).parents[1] / "docs"
_NOTE = "<!-- Written by tools/reference.py: change the {} and run it again. -->\n"


def configuration() -> str:
    """Every key of a run's YAML, with its default and its meaning."""
    lines = [_NOTE.format("schema, qlora_wgpu/config/sections,"), "# Configuration\n"]
    lines.append(
        "A run is one YAML file. Every key has a default but `model.path`; `data.train` is needed\n"
        "for training. Values can be given on the command line, too: `train.max_steps=100`.\n"
        "`configs/example.yaml` is a file with all of them.\n"
    )
    lines.append(
        "When resuming (`--resume`), settings must match the original run, except:\n"
        + ", ".join(_free_on_resume())
        + ".\n"
    )
    for section, field in Config.model_fields.items():
        model = field.annotation
        lines.append(f"## {section}\n\n{summary(model)}\n")
        lines.append("| key | default | meaning |\n|---|---|---|")
        for key, leaf in model.model_fields.items():
            default = "required" if leaf.is_required() else f"`{_shown(leaf.get_default())}`"
            meaning = " ".join((leaf.description or "").split()).replace("|", "\\|")
            lines.append(f"| `{section}.{key}` | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _free_on_resume() -> list[str]:
    """The keys that may change, a section of them as a whole."""
    fixed = set(Config(model={"path": "x"}).fixed_settings())
    names = []
    for section, field in Config.model_fields.items():
        keys = [f"{section}.{key}" for key in field.annotation.model_fields]
        free = [key for key in keys if key not in fixed]
        names += [f"`{section}.*`"] if free == keys and len(keys) > 1 else [f"`{k}`" for k in free]
    return names


def command_line() -> str:
    """Every command's help, as it prints it."""
    lines = [_NOTE.format("commands, qlora_wgpu/cli,"), "# Commands\n"]
    lines.append(
        "A command exits with 0 on success, and with 2 after an error, which is one sentence on\n"
        "what is wrong, where, and what to do. A command that is stopped exits with 128 plus the\n"
        "signal's number, such as 130 after Ctrl-C; `chat` and `web --serve` then exit with 0.\n"
    )
    verbs = deepcopy(commands)
    parent = click.Context(verbs, info_name="qlora-wgpu", **verbs.context_settings)
    for name in verbs.list_commands(parent):
        command = verbs.get_command(parent, name)
        command._help_option = None  # which is that of the first caller in this process
        context = click.Context(command, info_name=name, parent=parent, terminal_width=90)
        lines.append(f"## {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(lines)


def limits_page() -> str:
    """The page as it is, with a table for each part of limits.py in its place."""
    page = (DOCS / "limits.md").read_text(encoding="utf-8")
    before, rest = re.split(r"(?<=limits\.py -->\n)", page)
    after = rest[rest.index("<!-- end of limits -->") :]
    lines = []
    missing = {name for name in vars(limits) if name.isupper()} - {"KIB", "MIB", "GIB"}
    for line in Path(limits.__file__).read_text(encoding="utf-8").splitlines():
        if title := re.fullmatch(r"# (.+)", line):
            lines.append(f"\n## {title[1]}\n\n| | limit |\n|---|---|")
        elif found := re.fullmatch(r"([A-Z_]+) = (.+?)  # (.+)", line):
            name, written, meaning = found.groups()
            missing.remove(name)
            lines.append(f"| {meaning} | {_limit(getattr(limits, name), 'IB' in written)} |")
    if missing:
        sys.exit(f"limits.py has no comment on the line of {', '.join(sorted(missing))}")
    return before + "\n".join(lines) + "\n\n" + after


def _limit(value: object, in_bytes: bool) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:g} to {value[1]:g}"
    if not isinstance(value, int):
        return f"{value:g}"
    if not in_bytes:
        return f"{value:,}" if value < 2**32 else f"2^{value.bit_length() - 1}"
    units = {"GiB": limits.GIB, "MiB": limits.MIB, "KiB": limits.KIB}
    unit = next(name for name, size in units.items() if value >= size)
    return f"{value / units[unit]:g} {unit}"


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return yaml.safe_dump(value).split("\n")[0]
    return f"{value:g}" if isinstance(value, float) else str(value)


PAGES = {"configuration.md": configuration, "cli.md": command_line, "limits.md": limits_page}


def main() -> None:
    """Writes or checks them."""
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/{name} is out of date: run python tools/reference.py")


if __name__ == "__main__":
    main()
