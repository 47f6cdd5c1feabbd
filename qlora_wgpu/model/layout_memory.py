"""Bytes that a model which is laid out takes, on the device and of the host."""

from __future__ import annotations

from collections import Counter

from qlora_wgpu.gpu.profile import Profile
from qlora_wgpu.graph.dtype import ITEM_SIZE
from qlora_wgpu.graph.host_steps import transfer_bytes
from qlora_wgpu.graph.plan import Plan
from qlora_wgpu.graph.tensor import matrix
from qlora_wgpu.lora.layout import Adapter
from qlora_wgpu.model.copy_sizes import CopySizes, copy_sizes
from qlora_wgpu.model.kept_weights import kept_bytes
from qlora_wgpu.model.network import Network
from qlora_wgpu.model.pretrained import Pretrained
from qlora_wgpu.model.residency import Residency
from qlora_wgpu.model.weights import WeightLayout
from qlora_wgpu.ops import host_moments


class LayoutMemory:
    """The part of a ``ModelLayout`` that knows sizes; its attributes are described there."""

    pretrained: Pretrained
    compute_dtype: str
    profile: Profile
    residency: Residency
    adapter: Adapter
    network: Network
    _weights: WeightLayout

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.pretrained.architecture.num_layers

    @property
    def num_tensors(self) -> int:
        """Number of tensors that ``load`` reads."""
        return self._weights.places.num_tensors

    @property
    def section_bytes(self) -> list[int]:
        """Bytes of the weights of each layer that comes and goes."""
        return self._weights.places.section_bytes

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes on the device of what of each layer could come and go, and stays."""
        return self._weights.places.layer_bytes

    @property
    def head_block_bytes(self) -> list[int]:
        """Bytes of each block of the head that comes and goes."""
        return self._weights.places.head_block_bytes

    @property
    def head_ways(self) -> tuple[bool, ...]:
        """Whether the head may stay on the device, and whether it may wait in host memory.

        One that is trained whole stays.
        """
        of = self.pretrained.architecture
        module = (of.embed_name if of.tied else of.head_name).removesuffix(".weight")
        return (False,) if module in self.adapter.trained_whole else (False, True)

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.pretrained.architecture.tied

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the input embedding, if it may wait in host memory by itself; else 0."""
        of = self.pretrained.architecture
        stays = self.tied or of.embed_name.removesuffix(".weight") in self.adapter.trained_whole
        return 0 if stays else of.vocab_size * self.embedded_row_bytes

    @property
    def embedded_row_bytes(self) -> int:
        """Bytes of a row of it."""
        return matrix("", 1, self.pretrained.architecture.hidden_size, self.compute_dtype).nbytes

    @property
    def moments_passing(self) -> int:
        """Bytes on the device that moments pass through, if they wait in host memory."""
        moments = self.adapter.moments
        return host_moments.passing_bytes(moments.piece_lengths, len(moments.vectors))

    @property
    def weight_dtype(self) -> str:
        """Element type of frozen weights that products read."""
        return self.profile.weight_dtype(self.compute_dtype)

    def sizes_of_copies(self) -> CopySizes:
        """Those for new tokens: of all linear layers, without experts, and of the head."""
        of = self.pretrained.architecture
        weights = sum(spec.out_features * spec.in_features for spec in of.linears)
        head = of.vocab_size * self.embedded_row_bytes
        return copy_sizes(head, weights, ITEM_SIZE[self.weight_dtype])

    @property
    def dequantized_bytes(self) -> int:
        """Bytes, more or less, that quantized matrices take more where they are kept dequantized.

        What comes and goes is not, nor is what is so already.
        """
        if self.residency.dequantized:
            return 0
        return kept_bytes(self.network.modules, self.weight_dtype)

    @property
    def loading_bytes(self) -> int:
        """Bytes of host memory that are taken for a moment while weights are read."""
        return self._weights.places.loading_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that are read from files whenever a step needs them."""
        return self._weights.places.mapped_bytes

    def weights_on_host(self) -> Counter[str]:
        """Bytes of host memory by kind that weights take, and what they pass through."""
        memory = self._weights.places.host_bytes()
        memory["transfers"] = self._weights.places.transfer_bytes
        return +memory

    def device_memory(self, plan: Plan) -> Counter[str]:
        """Bytes on the device by kind while a plan trains."""
        memory = plan.bytes_by_kind()
        memory["uniforms"] = plan.uniform_bytes
        if not self.adapter.forms.updates:
            return memory
        moments = self.adapter.moments
        memory["optimizer"] = moments.nbytes_beside
        if self.residency.host_moments:
            memory["staging"] += self.moments_passing
        else:
            memory["optimizer"] += moments.nbytes
        return memory

    def waiting_memory(self, plan: Plan) -> Counter[str]:
        """Bytes of host memory by kind that wait while it does."""
        memory = self._weights.places.host_bytes()
        memory["layer inputs"] = plan.parked_bytes
        memory["transfers"] = transfer_bytes(plan)
        if self.residency.host_moments:
            moments = self.adapter.moments
            memory["optimizer"] = moments.nbytes
            count = len(moments.vectors)
            memory["transfers"] += host_moments.transfer_bytes(moments.piece_lengths, count)
        return +memory
