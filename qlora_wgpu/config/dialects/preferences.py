"""Other trainers' settings for preference optimization (DPO, ORPO, KTO) and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects import policies
from qlora_wgpu.config.dialects.draft import Draft, RowSpec, mapping_of
from qlora_wgpu.config.sections.grpo import POLICY_OBJECTIVES
from qlora_wgpu.config.sections.train import LOSSES, SCORED

# ---- objectives ----------------------------------------------------------------------------------

ONLY_SUPPORTED = "is not supported (supported: {})"
OTHER_LOSS = "is a loss that is not supported"
ONLY_ROBUST = "only TRL's losses robust and exo_pair use label_smoothing"
_UNSUPPORTED = {
    "noise is not supported for preferences": "neftune_noise_alpha noisy_embedding_alpha",
    "load balancing is not supported for preferences": "router_aux_loss_coef moe_aux_loss_coef",
    "it only affects supervised losses, in TRL as well": "label_smoothing_factor",
    "data.truncation handles rows that are too long": "max_prompt_length max_completion_length",
}

# Keys that only one of TRL's trainers has; DPO and ORPO cannot be told apart by their keys.
_TRL_KTO = "desirable_weight undesirable_weight"
_TRL_DPO = (
    "beta label_smoothing loss_weights use_weighting ld_alpha rpo_alpha f_divergence_type "
    "discopop_tau reference_free sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
    "precompute_ref_log_probs precompute_ref_batch_size max_prompt_length"
)
_TRL_OTHERS = (
    "reward_model_path reward_model_name_or_path lmbda "
    "teacher_model_name_or_path num_ppo_epochs cpo_alpha"
)
_LOSS_TERMS = {
    "WPO's weights are not supported": "use_weighting dpo_use_weighting",
    "LD-DPO's weights are not supported": "ld_alpha ld_dpo_alpha",
    "sums of losses are not supported": "loss_weights rpo_alpha pref_ftx pref_bco_weight",
    "the reference model is the one at the start of the run": (
        "sync_ref_model ref_model ref_model_adapters"
    ),
}
"""Keys that change the loss, by the reason why they are dropped."""


def convert_trl(draft: Draft) -> str:
    """The objective of TRL's trainers, which share most of their keys."""
    if (policy := policies.convert_policy(draft)) is not None:
        return policy
    for key in _TRL_OTHERS.split():
        if (value := draft.remaining.get(key)) is not None:
            raise draft.refuse(key, value, "belongs to a trainer that is not supported "
                               "(supported: sft, dpo, orpo, kto, grpo, rloo, reward)")  # fmt: skip
    is_scored = draft.remaining.get("lora_task_type") == "SEQ_CLS"
    if is_scored or "center_rewards_coefficient" in draft.remaining:
        return _convert_trl_reward(draft)
    loss = _single_loss(draft, "loss_type")
    keys = {key for key, value in draft.remaining.items() if value is not None}
    if keys & set(_TRL_KTO.split()) or loss in LOSSES["kto"]:
        objective = "kto"
    elif keys & set(_TRL_DPO.split()) or loss in LOSSES["dpo"]:
        objective = "dpo"
    elif loss in (None, "nll", "chunked_nll", "dft"):
        if loss == "dft":
            draft.set("train.loss_type", "dft", "loss_type")
        return "sft"
    else:
        raise draft.refuse("loss_type", loss, OTHER_LOSS)
    _set_objective(draft, objective, loss, "loss_type")
    if objective == "dpo" and loss is None and draft.remaining.get("label_smoothing") is None:
        draft.note("`trl dpo` and TRL's ORPO have the same keys: for ORPO, set "
                           "train.objective: orpo")  # fmt: skip
    weights = ("beta", "desirable_weight", "undesirable_weight")
    draft.convert({key: f"train.{key}" for key in weights})
    _convert_label_smoothing(draft, "label_smoothing")
    if (divergence := draft.take("f_divergence_type", "reverse_kl")) != "reverse_kl":
        raise draft.refuse("f_divergence_type", divergence, OTHER_LOSS)
    if draft.take("reference_free"):
        raise draft.refuse("reference_free", True, OTHER_LOSS)
    _convert_common(draft)
    if draft.remaining.get("learning_rate") is None:
        draft.set("optim.learning_rate", 1e-6, "TRL's default for preferences")
    return objective


def _convert_trl_reward(draft: Draft) -> str:
    """TRL's RewardTrainer, whose keys are the others' but for one."""
    draft.take("lora_task_type")
    _set_reward(draft, "center_rewards_coefficient")
    draft.set("data.truncation", "drop", "TRL drops rows longer than max_length")
    if draft.remaining.get("learning_rate") is None:
        draft.set("optim.learning_rate", 1e-4, "TRL's default for reward models")
    return "reward"


def _set_reward(draft: Draft, origin: str) -> None:
    _set_objective(draft, "reward", None, origin)
    draft.convert({"center_rewards_coefficient": "train.center_rewards_coefficient"})
    for key in ("packing", "sample_packing", "eval_packing", "eval_sample_packing"):
        if value := draft.take(key):
            draft.drop(key, value, "a reward model scores one sequence per row")
    _convert_common(draft)


def convert_axolotl(draft: Draft) -> str:
    """The objective of Axolotl's ``rl``, or of its ``reward_model``."""
    if draft.take("reward_model"):
        _set_reward(draft, "reward_model")
        return "reward"
    method = str(draft.take("rl", "sft"))
    objective = {"ipo": "dpo"}.get(method, method)
    if objective in POLICY_OBJECTIVES:
        for key, value in mapping_of(draft.take("trl")).items():
            draft.remaining.setdefault(key, value)
        return policies.convert_policy(draft, objective) or _plain_policy(draft, objective)
    if objective not in LOSSES or objective in SCORED:
        raise draft.refuse("rl", method, ONLY_SUPPORTED.format("dpo, ipo, orpo, kto, grpo"))
    if objective == "sft":
        return objective
    loss = _single_loss(draft, "dpo_loss_type")
    _set_objective(draft, objective, "ipo" if method == "ipo" else loss, "rl")
    betas = ("rl_beta", "dpo_beta", *(["orpo_alpha"] if objective == "orpo" else []))
    draft.convert(dict.fromkeys(betas, "train.beta"))
    trl = mapping_of(draft.remaining.get("trl"))  # its beta wins over ``rl_beta``
    if trl.get("beta") is not None:
        draft.set("train.beta", trl["beta"], "trl.beta")
        draft.remaining["trl"] = {key: trl[key] for key in trl if key != "beta"} or None
    draft.convert({
        "kto_desirable_weight": "train.desirable_weight",
        "kto_undesirable_weight": "train.undesirable_weight",
    })  # fmt: skip
    _convert_label_smoothing(draft, "dpo_label_smoothing")
    _convert_common(draft)
    return objective


def _plain_policy(draft: Draft, objective: str) -> str:
    """GRPO with all defaults."""
    draft.set("train.objective", objective, "rl")
    return objective


def convert_llama_factory(draft: Draft, stage: str) -> str:
    """The objective of LLaMA-Factory's stages ``dpo`` and ``kto``."""
    if stage not in ("dpo", "kto"):
        raise draft.refuse("stage", stage, ONLY_SUPPORTED.format("pt, sft, dpo, kto"))
    loss = str(draft.take("pref_loss", "sigmoid"))
    if stage == "kto":
        _set_objective(draft, "kto", None, "stage")
        draft.convert({
            "kto_chosen_weight": "train.desirable_weight",
            "kto_rejected_weight": "train.undesirable_weight",
        })  # fmt: skip
    elif loss == "orpo":
        _set_objective(draft, "orpo", None, "pref_loss: orpo")
        draft.note("ORPO's supervised loss is on prompt and answer, as in TRL; in "
                           "LLaMA-Factory it is on the answer")  # fmt: skip
    elif loss in ("sigmoid", "hinge", "ipo"):
        _set_objective(draft, "dpo", loss, "pref_loss")
    else:
        raise draft.refuse("pref_loss", loss, OTHER_LOSS)
    draft.convert({"pref_beta": "train.beta"})
    if smoothing := draft.take("dpo_label_smoothing", 0):
        draft.drop("dpo_label_smoothing", smoothing, ONLY_ROBUST)
    if draft.remaining.get("adapter_name_or_path") is not None:
        draft.note("the reference model is the base with that adapter, not the base")
    _convert_common(draft)
    return "kto" if stage == "kto" else draft.get("train.objective")


def _set_objective(draft: Draft, objective: str, loss: str | None, origin: str) -> None:
    draft.set("train.objective", objective, origin)
    if loss is not None:
        if loss not in LOSSES[objective]:
            raise draft.refuse("loss_type", loss, OTHER_LOSS)
        draft.set("train.loss_type", loss, origin)


def _single_loss(draft: Draft, key: str) -> str | None:
    """The loss, which may be a list of one."""
    given: Any = draft.take(key)
    names = given if isinstance(given, list) else [] if given is None else [given]
    if len(names) > 1:
        raise draft.refuse(key, given, "is a sum of losses, which is not supported")
    return str(names[0]) if names else None


def _convert_label_smoothing(draft: Draft, key: str) -> None:
    if not (smoothing := draft.take(key, 0)):
        return
    if draft.get("train.loss_type") in ("robust", "exo_pair"):
        draft.set("train.label_smoothing", smoothing, key)
    else:
        draft.drop(key, smoothing, ONLY_ROBUST)


def _convert_common(draft: Draft) -> None:
    """Converts the keys that all trainers have, and drops those for supervised training."""
    if draft.take("disable_dropout", True):
        draft.remaining.pop("lora_dropout", None)
        draft.set("lora.lora_dropout", 0.0, "TRL's default for preferences, disable_dropout")
    for reason, keys in _LOSS_TERMS.items():
        for key in keys.split():
            if value := draft.take(key):
                draft.drop(key, value, reason)
    for reason, keys in _UNSUPPORTED.items():
        for key in keys.split():
            if draft.remaining.get(key):
                draft.drop_key(key, reason)


# ---- rows ----------------------------------------------------------------------------------------

_AS_MESSAGES = "text prompts and answers get no chat template, as in TRL: write them as messages"


def settle_rows(draft: Draft, objective: str) -> None:
    """Drops the format and loss mask for preferences, which are detected by their keys."""
    if objective == "sft":
        return
    for ours in ("data.format", "data.train_on"):
        if (mapped := draft.settings.pop(ours, None)) is not None:
            reason = "preferences are detected by their keys, and only answers are compared"
            if objective in POLICY_OBJECTIVES:
                reason = "only prompts are read, by their keys"
            draft.drop(mapped.origin, mapped.value, reason)


def rows_of_axolotl(draft: Draft, entry: Mapping[str, Any], key: str) -> RowSpec:
    """The rows of one of Axolotl's data sets."""
    kind = entry.get("type")
    template, _, rows = str(kind).partition(".")
    if template == "bradley_terry":  # a question and two answers, as turns of a chat
        draft.set("data.apply_chat_template", True, f"type: {kind}")
        return RowSpec.named(None, {"prompt": "input"}, f"type: {kind}")
    if not isinstance(kind, str) or rows not in _AXOLOTL_ROWS:
        if kind is not None:
            draft.drop(key, kind, f"answers are detected by their keys; {_AS_MESSAGES}")
        return RowSpec()
    if template != "chat_template":
        draft.set_chat_template(template, key)
    columns, has_messages = _AXOLOTL_ROWS[rows]
    if not has_messages:
        draft.drop(key, kind, _AS_MESSAGES)
    given = {key: entry.get(f"field_{key}") for key in ("messages", "chosen", "rejected")}
    renamed = {key: name for key, name in given.items() if name}
    return RowSpec.named(None, {**columns, **renamed}, f"type: {kind}")


_AXOLOTL_ROWS: dict[str, tuple[dict[str, str], bool]] = {
    "default": ({}, True),
    "argilla_chat": ({}, True),
    "ultra": ({}, True),
    "intel": ({"prompt": "question"}, False),
    "icr": ({"prompt": "input"}, False),
    "prompt_pairs": ({}, False),
    "argilla": (
        {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"},
        False,
    ),
}
"""Columns by our keys, and whether they contain messages."""


def rows_of_llama_factory(
    draft: Draft, entry: Mapping[str, Any], name: str, objective: str
) -> RowSpec:
    """The rows of one of LLaMA-Factory's data sets."""
    columns = mapping_of(entry.get("columns"))
    origin = f"dataset_info.json: {name}"
    answers = {key: columns.get(key) for key in ("chosen", "rejected")}
    is_unpaired = objective == "kto" and not entry.get("ranking")
    if is_unpaired:
        answers = {"label": columns.get("kto_tag")}
    if entry.get("formatting", "alpaca") != "alpaca":
        prompt = columns.get("messages", "conversations")
        key = "completion" if is_unpaired else "conversations"
        more = {each: columns.get(each) for each in ("system", "tools")}
        return RowSpec.named(None, {key: prompt, **answers, **more}, origin)
    draft.set("data.apply_chat_template", True, "as LLaMA-Factory does for instructions")
    response = {"completion": columns.get("response", "output")} if is_unpaired else {}
    prompt = {**prompt_of_llama_factory(columns), "system": columns.get("system")}
    return RowSpec.named(None, {**prompt, **answers, **response}, origin)


def prompt_of_llama_factory(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of an instruction, or the one of a prompt.

    If some columns are named, LLaMA-Factory reads no others, not even ``input``.
    """
    request, extra = columns.get("prompt"), columns.get("query")
    if columns.get("history") or not columns or (request and extra):
        return {"instruction": request, "input": extra, "history": columns.get("history")}
    return {"prompt": request or extra or "instruction"}
