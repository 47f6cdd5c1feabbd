"""Tensors and layers of graphs that are traced and never run."""

from qlora_wgpu.graph.tensor import Storage, matrix
from qlora_wgpu.ops.modules import DenseMatrix, Linear


def stored(name, rows, columns, dtype="float32", grad=False):
    tensor = matrix(name, rows, columns, dtype)
    tensor.storage = Storage(name, "test", tensor.nbytes)
    tensor.requires_grad = grad
    return tensor


def labels(graph):
    return [launch.label for launch in graph.launches]


def dense(graph, name, rows, columns):
    return Linear(
        name,
        DenseMatrix(rows, columns, ((0, stored(name, rows, columns, graph.dtype)),)),
        None,
        None,
    )
