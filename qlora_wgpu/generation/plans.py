"""The plans of an engine's programs, and how many sequences at a time fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from qlora_wgpu.generation.prefill import largest_batch, sample_count
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.limits import memory_bytes
from qlora_wgpu.gpu.memory import available_bytes, room
from qlora_wgpu.graph.plan import Plan, compile_plan
from qlora_wgpu.graph.program import pool_bytes
from qlora_wgpu.model.memory_plan import copied_bytes
from qlora_wgpu.model.model_plan import ModelPlan
from qlora_wgpu.ops.kv_cache import KVCache, copy_sequence
from qlora_wgpu.ops.sampling import make_seen

_PROMPT = 512  # tokens of a prompt if they are unknown


def batch_sizes(texts: int) -> list[int]:
    """The powers of two below a number of requests, and the number itself."""
    return [1 << n for n in range((texts - 1).bit_length())] + [texts]


def text_plans(
    layout: ModelPlan, cache: KVCache, sizes: Iterable[tuple[int, int]], *, images: bool = False
) -> Iterator[Plan]:
    """The plans of a generation engine, two per size, in the order in which they are compiled.

    With several sequences also the plan that copies them; with ``images`` two more per size, for
    prompts that have some.
    """
    seen = make_seen(cache.texts + 1, layout.pretrained.architecture.vocab_size)
    for texts, tokens in sizes:
        samples = texts if tokens == 1 else sample_count(texts, tokens, cache.texts)
        for with_images in (True, False) if images else (False,):
            graphs = layout.token_graphs(
                texts, tokens, cache, seen, samples=samples, with_images=with_images
            )
            yield compile_plan(graphs.hidden, apart=graphs.apart)
            yield compile_plan(graphs.head, apart=graphs.apart)
    if cache.texts > 1:
        graph = layout.new_graph()
        copy_sequence(graph, cache)
        yield compile_plan(graph)


def bound_sequences(layout: ModelPlan, capacity: int, texts: int, max_binding: int) -> int:
    """How many sequences' keys, or states, fit into one binding: at most ``texts``, at least one.

    ``capacity`` is the maximum number of tokens of a sequence.
    """
    if texts == 1:
        return 1
    cache = KVCache(capacity)
    layout.token_graphs(1, 1, cache, make_seen(1, layout.pretrained.architecture.vocab_size))
    kept = [*(each for pair in cache.layers for each in pair), *cache.states]
    return max(min(texts, max_binding // max(tensor.nbytes for tensor in kept)), 1)


def fitting_sequences(layout: ModelPlan, device: Device, capacity: int, texts: int) -> int:
    """How many sequences can be decoded at a time in the device's free memory, at most ``texts``.

    If not all fit, it is half of them, a quarter, and so on, but at least one.
    """
    count = bound_sequences(layout, capacity, texts, device.max_binding)
    free = room(device) if device.budget is None else device.budget - device.memory.total
    if device.is_cpu and device.budget is None and (free := available_bytes()) is not None:
        free -= max(copied_bytes(layout, None) - layout.packed_weights.nbytes, 0)
    while free is not None and count > 1 and _bytes_beside_weights(layout, capacity, count) > free:
        count //= 2
    return count


def _bytes_beside_weights(layout: ModelPlan, capacity: int, texts: int) -> int:
    prefill = largest_batch(min(_PROMPT, capacity), capacity, texts)
    plans = list(text_plans(layout, KVCache(capacity, texts), [prefill, (texts, 1)]))
    storages = dict.fromkeys(storage for plan in plans for storage in plan.storages)
    own = (each for each in storages if each.kind in ("kv cache", "inputs", "activations"))
    nbytes = sum(memory_bytes(each.nbytes, texture=each.texture) for each in own)
    programs = len(batch_sizes(texts))  # of about the same number of launches
    return nbytes + pool_bytes(plans) + programs * sum(plan.uniform_bytes for plan in plans)
