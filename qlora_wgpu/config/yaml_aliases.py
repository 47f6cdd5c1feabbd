"""Anchors, aliases and merge keys of a YAML document, written out: other trainers' files use them.

What an alias stands for may hold further ones, so that a few lines can stand for more than any
memory holds: the whole is counted while it is written out.
"""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from qlora_wgpu.errors import ConfigError
from qlora_wgpu.limits import YAML_DEPTH, YAML_NODES

_MERGE = "<<"
_Pair = tuple[yaml.Node, yaml.Node]


def written_out(node: yaml.Node, name: str) -> yaml.Node:
    """A document as a tree: each alias replaced by what it stands for, merge keys by their keys.

    Args:
        node: The document, as PyYAML composes it.
        name: The file's, for messages.

    Raises:
        ConfigError: If it becomes too large or too deep, or a merge key names no mapping.
    """
    return _Writer(name).node(node, 0)


class _Writer:
    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes = 0

    def node(self, node: yaml.Node, depth: int) -> yaml.Node:
        self._count(depth)
        if isinstance(node, yaml.SequenceNode):
            items = [self.node(item, depth + 1) for item in node.value]
            return yaml.SequenceNode(node.tag, items, node.start_mark)
        if isinstance(node, yaml.MappingNode):
            pairs = [(key, self.node(value, depth + 1)) for key, value in self._pairs(node, depth)]
            return yaml.MappingNode(node.tag, pairs, node.start_mark)
        return node

    def _count(self, depth: int) -> None:
        self._nodes += 1
        if self._nodes > YAML_NODES or depth > YAML_DEPTH:
            raise ConfigError(
                f"{self._name} is too large or too deep with its aliases (*) written out, one of "
                "which may stand for itself"
            )

    def _pairs(self, node: yaml.MappingNode, depth: int) -> Iterator[_Pair]:
        """Keys of a mapping, those that are merged into it last: its own win, then earlier ones."""
        own = [pair for pair in node.value if not _is_merge(pair[0])]
        yield from own
        seen = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
        for key, value in node.value:
            if not _is_merge(key):
                continue
            for merged in self._merged(value, depth + 1):
                yield from (pair for pair in merged if pair[0].value not in seen)
                seen |= {pair[0].value for pair in merged}

    def _merged(self, value: yaml.Node, depth: int) -> Iterator[list[_Pair]]:
        """The keys of a mapping, or of each of several, that a merge key names."""
        sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for source in sources:
            self._count(depth)
            if not isinstance(source, yaml.MappingNode):
                line = value.start_mark.line + 1
                raise ConfigError(f"{self._name} (line {line}) merges (<<) what is no mapping")
            pairs = list(self._pairs(source, depth))
            yield [pair for pair in pairs if isinstance(pair[0], yaml.ScalarNode)]


def _is_merge(key: yaml.Node) -> bool:
    return isinstance(key, yaml.ScalarNode) and key.value == _MERGE and key.style is None
