"""What of a model and of its steps is on the device, and what is offloaded to host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class OffloadPlan:
    """Measures that change memory and speed, and nothing that is computed."""

    # Whether the host looks up the input embedding, and writes its rows with each micro-batch. A
    # tied embedding does so where the head is streamed.
    host_embedding: bool = False
    # Whether the layers' inputs, which checkpointing keeps for the backward, are in host memory.
    offload_layer_inputs: bool = False
    # How many layers are recomputed at once; only the first one's input is kept.
    layers_per_segment: int = 1
    # Whether the optimizer's moments are in host memory, and pass through the device in each step's
    # update.
    host_moments: bool = False
    # How many layers, counted from the last, have their linear weights streamed.
    streamed_layers: int = 0
    # Whether ``lm_head`` is streamed in blocks of the vocabulary, so that neither it nor the logits
    # of all tokens are on the device.
    streamed_head: bool = False
    # Whether outputs of norms, gated units and activations are rematerialized in the backward. On
    # GPUs (``Profile.remakes``) they are in any case where layers are not recomputed.
    remakes: bool = False
    # Whether quantized matrices that stay on the device are kept dequantized beside their codes.
    # That takes memory instead of saving it: no step dequantizes them anew.
    dequantized: bool = False
    # Whether intermediates that would all lie in textures (``Profile.in_textures``) lie in buffers
    # if they fit a binding, where sums take one place instead of two. They do so as well where
    # anything else saves memory.
    in_buffers: bool = False
    # How many layers, counted from the last, are kept where the others are recomputed.
    kept_layers: int = 0

    @property
    def saves_memory(self) -> bool:
        """Whether anything is done to save memory."""
        return replace(self, kept_layers=0, dequantized=False) != RESIDENT

    def in_words(self, layers: int) -> list[tuple[str, str]]:
        """What is offloaded of a model of so many layers: for a table, and for a sentence."""
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
        """Everything offloaded that can be, for a step whose layers are recomputed."""
        return cls(True, True, 1, True, num_layers, True, True)


RESIDENT = OffloadPlan()
