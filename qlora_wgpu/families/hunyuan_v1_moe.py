"""Hunyuan as mixtures of experts (Tencent, 2025): Hunyuan-A13B and others."""

from qlora_wgpu.errors import UnsupportedModelError, brief
from qlora_wgpu.families import parts
from qlora_wgpu.families.hunyuan_v1_dense import compose_with


def compose(read: parts.ConfigReader) -> parts.Decoder:
    """As the dense models, with experts and a shared expert of the same size in every layer."""
    read = read.renamed("moe_topk", "num_experts_per_tok").renamed(
        "num_experts", "num_local_experts"
    )
    dimensions, activation = parts.Dimensions.read(read), parts.read_activation(read)
    count = read.integer("num_experts", 1)
    parts.refuse_balance_loss(read)
    shared = parts.SharedExpert(parts.GatedMLP(dimensions, activation, name="mlp.shared_mlp"))
    mlps = []
    for top in _chosen(read, dimensions.num_hidden_layers):
        parts.check_expert_counts(read, ("num_experts", count), ("moe_topk", top))
        size = dimensions.intermediate_size
        experts = parts.SparseMoeBlock(
            dimensions.hidden_size, size, activation, count, top,
            router="gate.wg", router_is_module=True, shared=shared,
        )  # fmt: skip
        mlps.append(experts)
    return compose_with(read, dimensions, mlps)


def _chosen(read: parts.ConfigReader, layers: int) -> list[int]:
    """Experts per token in each layer, by one number or a list."""
    listed = read.config.get("moe_topk")
    if not isinstance(listed, list):
        return [read.integer("moe_topk", 1)] * layers
    if len(listed) < layers or any(type(each) is not int or each < 1 for each in listed):
        raise UnsupportedModelError(
            f"config.json: moe_topk must have a positive number for each of the {layers} layers, "
            f"got {brief(listed)}"
        )
    return listed[:layers]
