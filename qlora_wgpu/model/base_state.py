"""The frozen weights, read back from the device as its kernels see them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qlora_wgpu.families.family import stored_parts
from qlora_wgpu.gpu.device import Device
from qlora_wgpu.graph.dtype import stored_floats
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.model.adapter_state import read_vector
from qlora_wgpu.model.layout import ModelLayout
from qlora_wgpu.model.programs import Programs
from qlora_wgpu.ops.modules import ExpertMatrix, HostMatrix, Matrix, StreamedMatrix

FloatArray = npt.NDArray[np.float32]


def base_state_dict(
    layout: ModelLayout, programs: Programs, device: Device
) -> dict[str, FloatArray]:
    """Every weight by Hugging Face's name, float32."""
    return _BaseState(layout, programs, device).read()


class _BaseState:
    def __init__(self, layout: ModelLayout, programs: Programs, device: Device) -> None:
        self._layout = layout
        self._programs = programs
        self._device = device

    def read(self) -> dict[str, FloatArray]:
        modules, architecture = self._layout.network.modules, self._layout.pretrained.architecture
        state = {architecture.embed_name: self._matrix(modules.embedding)}
        if not architecture.tied:
            state[architecture.head_name] = self._matrix(modules.head)
        for name, layer in modules.linears.items():
            state[f"{name}.weight"] = self._matrix(layer.weight)
            if layer.bias is not None:
                whole = read_vector(self._device, layer.bias)
                state[f"{name}.bias"] = whole[: layer.bias.columns]
        for stack in architecture.experts:
            linear = modules.experts[stack.name]
            for spec, array in zip(stack.linears, self._experts(linear.weight), strict=True):
                state[f"{spec.name}.weight"] = array
            if (bias := linear.bias) is not None:
                rows = read_vector(self._device, bias).reshape(bias.rows, bias.stride)
                for spec, array in zip(stack.linears, rows, strict=True):
                    state[f"{spec.name}.bias"] = array[: bias.columns]
        for name, router in modules.routers.items():
            state[name] = self._matrix(router)
        for name, table in modules.tables.items():
            state[name] = self._matrix(table)
        for name, shape in architecture.norm_shapes.items():
            norm = modules.norms[name]
            rows = read_vector(self._device, norm).reshape(norm.rows, norm.stride)
            offset = np.float32(architecture.offset_of(name))
            whole = rows[:, : norm.columns] - offset
            parts = stored_parts(name, shape)
            for (part, own), array in zip(parts, np.split(whole, len(parts)), strict=True):
                state[part] = array.reshape(own)
        for module, trained in self._layout.adapter.trained_rows.items():
            state[f"{module}.weight"][list(trained.indices)] = trained.originals
        for module, matrix in self._layout.adapter.trained_whole.items():
            assert matrix.originals is not None
            state[f"{module}.weight"] = matrix.originals()
        return state

    def _matrix(self, weight: Matrix | HostMatrix) -> FloatArray:
        if isinstance(weight, StreamedMatrix):
            weight = weight.host
        if isinstance(weight, HostMatrix):
            rows = weight.taken(np.arange(weight.rows))
            return stored_floats(rows.data.cast("B"), weight.dtype).reshape(rows.shape)[
                :, : weight.columns
            ]
        graph = self._layout.new_graph()
        return self._shards(graph, [shard for _, shard in weight.shards(graph)])

    def _experts(self, weight: ExpertMatrix) -> FloatArray:
        graph = self._layout.new_graph()
        shards = [shard for _, _, shard in weight.expert_shards(graph)]
        whole = self._shards(graph, shards)
        return whole.reshape(weight.experts, weight.rows, weight.columns)

    def _shards(self, graph: Graph, shards: list[Tensor]) -> FloatArray:
        program = self._programs.from_graph(graph, tuple(shards))
        program.run()
        return np.concatenate([_rows(shard, program.read(shard)) for shard in shards])


def _rows(shard: Tensor, raw: memoryview) -> FloatArray:
    array = stored_floats(raw, shard.dtype)
    return array.reshape(shard.rows, shard.stride)[:, : shard.columns]
