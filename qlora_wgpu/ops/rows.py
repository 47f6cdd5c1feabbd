"""Row-wise launches: how rows are spread over workgroups, and gathering and scattering them."""

from __future__ import annotations

from qlora_wgpu.gpu.device import fold_workgroups
from qlora_wgpu.gpu.wgsl import Constant
from qlora_wgpu.graph.dtype import ITEM_SIZE, ceil_div
from qlora_wgpu.graph.graph import Graph
from qlora_wgpu.graph.tensor import Tensor
from qlora_wgpu.ops.batch import BatchBuffers


def row_constants(g: Graph) -> dict[str, Constant]:
    """The constants that ``common/row_reduce.wgsl`` and its users need."""
    lanes = g.profile.row_lanes
    return {
        "LANES": lanes,
        "ROWS": g.profile.rows_per_group,
        "ONE_LANE": lanes == 1,
        "SUBGROUP": g.profile.images,
    }


def row_workgroups(g: Graph, rows: int) -> tuple[int, int, int]:
    """Workgroups that cover so many rows."""
    return fold_workgroups(ceil_div(rows, g.profile.rows_per_group))


def gather(g: Graph, x: Tensor, count: int, first: int, batch: BatchBuffers) -> Tensor:
    """The label rows ``first`` to ``first + count`` of x, in front; zeros where there are none."""
    y = Tensor(f"{x.name} rows", count, x.columns, x.dtype, x.stride, image=x.image)
    stride = x.stride * ITEM_SIZE[x.dtype] // 16
    g.launch(
        "rows/gather.wgsl",
        count * stride,
        {"x": x, "rows": batch.label_rows, "batch_info": batch.info, "y": y},
        {"count": count, "first": first, "stride": stride},
        {"IMAGE": x.image},
    )
    return y


def scatter(g: Graph, x: Tensor, y: Tensor, first: int, batch: BatchBuffers) -> None:
    """Puts rows where ``gather`` took them from; x and y float32."""
    g.launch(
        "rows/scatter.wgsl",
        x.rows * x.units(4),
        {"x": x, "rows": batch.label_rows, "batch_info": batch.info, "y": y},
        {"count": x.rows, "first": first, "stride": x.units(4)},
    )
