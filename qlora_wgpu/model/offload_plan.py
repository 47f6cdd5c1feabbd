"""Which parts of a model and of its steps are on the device, and which are offloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OffloadPlan:
    """Measures that change memory and speed, but no result."""

    # Whether the host looks up the input embedding and writes its rows with each micro-batch; it
    # also does for a tied embedding if the head is streamed.
    host_embedding: bool = False
    # Whether the layers' inputs, which checkpointing keeps for the backward pass, are offloaded.
    offload_layer_inputs: bool = False
    # How many layers are recomputed at once; only the input of the first is kept.
    layers_per_segment: int = 1
    # Whether the optimizer's moments are in host memory and pass through the device in each update.
    host_moments: bool = False
    # How many layers, counted from the last, have their linear weights streamed.
    streamed_layers: int = 0
    # Whether ``lm_head`` is streamed in blocks of the vocabulary, so that neither it nor the logits
    # of the whole vocabulary are on the device.
    streamed_head: bool = False
    # Whether outputs of norms, gated units and activations are rematerialized in the backward pass;
    # on GPUs (``Profile.remakes``) they always are in layers that are not recomputed.
    remakes: bool = False
    # Whether resident quantized matrices are also kept dequantized, which takes memory instead of
    # saving it: no step has to dequantize them.
    dequantized: bool = False
    # Whether intermediates that would all be in textures (``Profile.in_textures``) are in buffers
    # if they fit a binding, where sums take one slot instead of two. They also are if any other
    # measure saves memory.
    in_buffers: bool = False
    # How many layers, counted from the last, are kept if the others are recomputed.
    kept_layers: int = 0

    @property
    def saves_memory(self) -> bool:
        return replace(self, kept_layers=0, dequantized=False) != RESIDENT

    def in_words(self, layers: int) -> list[tuple[str, str]]:
        """What is offloaded of a model with ``layers`` layers: for a table, and for a sentence."""
        some = f"{self.streamed_layers} of {layers} layers"
        kinds = (
            (self.host_embedding, "embedding", "the input embedding"),
            (self.offload_layer_inputs, "layers' inputs", "the layers' inputs"),
            (self.host_moments, "moments", "the optimizer's moments"),
            (self.streamed_layers > 0, some, f"the weights of {some}"),
            (self.streamed_head, "lm_head", "lm_head"),
        )
        return [(short, long) for offloaded, short, long in kinds if offloaded]

    @classmethod
    def least(cls, num_layers: int) -> OffloadPlan:
        """Everything possible offloaded, for a step whose layers are recomputed."""
        return cls(True, True, 1, True, num_layers, True, True)


RESIDENT = OffloadPlan()
