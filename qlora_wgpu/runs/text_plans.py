"""What texts that are generated compute, planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qlora_wgpu.graph.plan import Plan, make_plan
from qlora_wgpu.model.model_plan import ModelLayout
from qlora_wgpu.ops.kv_cache import KVCache
from qlora_wgpu.ops.sampling import make_seen


def text_plans(
    layout: ModelLayout, cache: KVCache, sizes: Iterable[tuple[int, int]]
) -> Iterator[Plan]:
    """The plans of an engine's programs, two of each, in the order in which they are made ready.

    Args:
        layout: The model.
        cache: Where the texts are kept.
        sizes: Texts and tokens of each program: prompts, or a token of some texts.
    """
    seen = make_seen(cache.texts, layout.pretrained.architecture.vocab_size)
    for texts, tokens in sizes:
        graphs = layout.token_graphs(texts, tokens, cache, seen)
        yield make_plan(graphs.hidden, apart=graphs.apart)
        yield make_plan(graphs.head, apart=graphs.apart)
