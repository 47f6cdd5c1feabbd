// Rows of which each tile of EXPERT_TILE belongs to one expert, where tile_experts is bound: the
// expert whose weights a row needs, counted from the first one at hand, and whether they are at
// hand. Weights and adapters of experts lie one below the other.
//#if tile_experts
@group(0) @binding(12) var<storage, read> tile_experts: array<u32>;

fn expert_of(row: u32) -> u32 {
    return tile_experts[row / EXPERT_TILE] - params.expert0;
}

fn is_here(expert: u32) -> bool {
    return expert < params.experts;
}

// Where an expert's adapter begins.
fn adapter_at(expert: u32) -> u32 {
    return (params.expert0 + expert) * params.lora_expert;
}
//#else
fn expert_of(row: u32) -> u32 {
    return 0u;
}

fn is_here(expert: u32) -> bool {
    return true;
}

fn adapter_at(expert: u32) -> u32 {
    return 0u;
}
//#endif
