"""Turns of a torch model with an adapter: eager, compiled, or as a CUDA graph of the whole step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from turns import Answer, Rows, Work, rows_of, timed

_SIDE_STEPS = 3  # on a side stream before a capture, as PyTorch's manual has it
_MIB = 2**20


class TorchTurns:
    """Trains a model in bfloat16, and gives back what a turn took beside its weights."""

    def __init__(
        self, model: Any, device: str, inputs: Callable[[Rows, Work], dict[str, Any]], *,
        graphs: bool = False, fused: bool = True,
    ) -> None:  # fmt: skip
        """Takes a model with its adapter.

        Args:
            model: What returns a ``loss``.
            device: ``"cuda"`` or ``"cpu"``.
            inputs: Makes its arguments, on the device.
            graphs: Whether steps are captured, and replayed.
            fused: Whether AdamW is one kernel.
        """
        self._model, self._device, self._inputs = model, device, inputs
        self._graphs, self._fused = graphs, fused and device == "cuda"
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, work: Work) -> Answer:
        """A turn."""
        if self._graphs and self._device != "cuda":
            raise RuntimeError(f"a CUDA graph needs a CUDA device, and this is {self._device}")
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        try:
            return {**self._timed(work), **self._memory()}
        finally:
            self._release()

    def _timed(self, work: Work) -> Answer:
        rows = rows_of(work, self._model.config.vocab_size)
        inputs = self._inputs(rows, work)
        optimizer = torch.optim.AdamW(
            self._trained, lr=2e-4, weight_decay=0.0, capturable=self._graphs,
            fused=self._fused or None,
        )  # fmt: skip

        def update() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            # A capture must not keep casts of an earlier step.
            with torch.autocast(self._device, torch.bfloat16, cache_enabled=not self._graphs):
                loss: torch.Tensor = self._model(**inputs).loss
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
            optimizer.step()
            return loss.detach()

        if not self._graphs:
            return timed(lambda: update().item(), work)
        first, graph, loss = captured(update, self._forget)

        def replay() -> float:
            graph.replay()
            return float(loss.item())

        return {**timed(replay, work), "first_loss": first}

    def _memory(self) -> Answer:
        if self._device != "cuda":
            return {}
        return {
            "own_mib": torch.cuda.max_memory_allocated() / _MIB,
            "reserved_mib": torch.cuda.max_memory_reserved() / _MIB,
        }

    def _release(self) -> None:
        """Leaves the weights alone on the device, for the others."""
        self._forget()
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _forget(self) -> None:
        for parameter in self._trained:
            parameter.grad = None


def captured(
    update: Callable[[], torch.Tensor], forget: Callable[[], None]
) -> tuple[float, Any, torch.Tensor]:
    """Captures a step: the loss of the first one, the graph, and where its loss comes to lie.

    ``forget`` drops the gradients, so that those of the capture lie in its own memory.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        losses = [update().item() for _ in range(_SIDE_STEPS)]
    torch.cuda.current_stream().wait_stream(side)
    forget()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = update()
    return losses[0], graph, loss


def compiled_notes() -> Answer:
    """What torch.compile made of it: a break or a second graph is why it is slow."""
    from torch._dynamo.utils import counters

    return {
        "graphs_compiled": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
    }
