"""Runs of other trainers that learn from preferences, in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_wgpu.config.dialects.draft import Draft, RowsOf
from qlora_wgpu.config.sections.train import LOSSES

AS_MESSAGES = (
    "prompts and answers that are text stand without a chat template here, as in TRL: write them "
    "as messages"
)
_NONE_SMOOTHED = "TRL's label_smoothing changes its losses robust and exo_pair alone"
_ANOTHER = "is another loss, which is not computed here"
_NOT_BESIDE = {
    "noise is not computed beside preferences": "neftune_noise_alpha noisy_embedding_alpha",
    "experts are not balanced beside preferences": "router_aux_loss_coef moe_aux_loss_coef",
    "it changes supervised losses alone, in TRL, too": "label_smoothing_factor",
    "a row that is too long is left out or cut as data.truncation says": (
        "max_prompt_length max_completion_length"
    ),
}

# Of TRL's trainers, what only these have. DPO's and ORPO's files have no key that tells them apart.
_TRL_KTO = "desirable_weight undesirable_weight"
_TRL_DPO = (
    "beta label_smoothing loss_weights use_weighting ld_alpha rpo_alpha f_divergence_type "
    "discopop_tau reference_free sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
    "precompute_ref_log_probs precompute_ref_batch_size max_prompt_length"
)
_TRL_OTHERS = (
    "num_generations reward_funcs reward_model_path reward_model_name_or_path use_vllm lmbda "
    "teacher_model_name_or_path num_ppo_epochs center_rewards_coefficient cpo_alpha"
)
_TERMS = {
    "loss_weights": "a sum of several losses is not computed",
    "use_weighting": "WPO's weights are not computed",
    "ld_alpha": "LD-DPO's weights are not computed",
    "rpo_alpha": "the sum with the supervised loss is not computed",
    "sync_ref_model": "the reference stays what it is as the run begins",
    "dpo_use_weighting": "WPO's weights are not computed",
    "pref_ftx": "the sum with the supervised loss is not computed",
    "pref_bco_weight": "the sum with BCO's loss is not computed",
    "ld_dpo_alpha": "LD-DPO's weights are not computed",
    "ref_model": "the reference is the model as the run begins",
    "ref_model_adapters": "the reference is the model as the run begins",
}
"""Keys that change the loss, and why they are not taken over."""


def convert_trl(draft: Draft) -> str:
    """The objective of a file of TRL's, whose trainers share most of their keys."""
    for key in _TRL_OTHERS.split():
        if (value := draft.theirs.get(key)) is not None:
            raise draft.refuse(key, value, "belongs to a trainer that is not done here: sft, dpo, "
                               "orpo and kto are")  # fmt: skip
    loss = _one_loss(draft, "loss_type")
    marks = {key for key, value in draft.theirs.items() if value is not None}
    if marks & set(_TRL_KTO.split()) or loss in LOSSES["kto"]:
        objective = "kto"
    elif marks & set(_TRL_DPO.split()) or loss in LOSSES["dpo"]:
        objective = "dpo"
    elif loss in (None, "nll", "chunked_nll", "dft"):
        if loss == "dft":
            draft.set("train.loss_type", "dft", "loss_type")
        return "sft"
    else:
        raise draft.refuse("loss_type", loss, _ANOTHER)
    _begin(draft, objective, loss, "loss_type")
    if objective == "dpo" and loss is None and draft.theirs.get("label_smoothing") is None:
        draft.notes.append(
            "the keys are those of `trl dpo` and of TRL's ORPO: set train.objective: orpo for this"
        )
    weights = ("beta", "desirable_weight", "undesirable_weight")
    draft.convert({key: f"train.{key}" for key in weights})
    _smooth(draft, "label_smoothing")
    divergence = draft.take("f_divergence_type", "reverse_kl")
    if divergence != "reverse_kl":
        raise draft.refuse("f_divergence_type", divergence, _ANOTHER)
    if draft.take("reference_free"):
        raise draft.refuse("reference_free", True, _ANOTHER)
    _finish(draft)
    if draft.theirs.get("learning_rate") is None:
        draft.set("optim.learning_rate", 1e-6, "TRL's default for preferences")
    return objective


def convert_axolotl(draft: Draft) -> str:
    """The objective that Axolotl's ``rl`` names."""
    method = str(draft.take("rl", "sft"))
    objective = {"ipo": "dpo"}.get(method, method)
    if objective not in LOSSES:
        raise draft.refuse("rl", method, "is not done here: dpo, ipo, orpo and kto are")
    if objective == "sft":
        return objective
    loss = _one_loss(draft, "dpo_loss_type")
    _begin(draft, objective, "ipo" if method == "ipo" else loss, "rl")
    betas = ("rl_beta", "dpo_beta", *(["orpo_alpha"] if objective == "orpo" else []))
    draft.convert(dict.fromkeys(betas, "train.beta"))
    own = draft.theirs.get("trl")  # its beta goes before ``rl_beta``
    if isinstance(own, Mapping) and own.get("beta") is not None:
        draft.set("train.beta", own["beta"], "trl.beta")
        draft.theirs["trl"] = {key: value for key, value in own.items() if key != "beta"} or None
    draft.convert({
        "kto_desirable_weight": "train.desirable_weight",
        "kto_undesirable_weight": "train.undesirable_weight",
    })  # fmt: skip
    _smooth(draft, "dpo_label_smoothing")
    _finish(draft)
    return objective


def convert_llama_factory(draft: Draft, stage: str) -> str:
    """The objective of LLaMA-Factory's stages ``dpo`` and ``kto``."""
    if stage not in ("dpo", "kto"):
        raise draft.refuse("stage", stage, "is not done here: pt, sft, dpo and kto are")
    loss = str(draft.take("pref_loss", "sigmoid"))
    if stage == "kto":
        _begin(draft, "kto", None, "stage")
        draft.convert({
            "kto_chosen_weight": "train.desirable_weight",
            "kto_rejected_weight": "train.undesirable_weight",
        })  # fmt: skip
    elif loss == "orpo":
        _begin(draft, "orpo", None, "pref_loss: orpo")
        draft.notes.append(
            "ORPO's supervised loss is of prompt and answer here, as in TRL; LLaMA-Factory's is "
            "of the answer"
        )
    elif loss in ("sigmoid", "hinge", "ipo"):
        _begin(draft, "dpo", loss, "pref_loss")
    else:
        raise draft.refuse("pref_loss", loss, _ANOTHER)
    draft.convert({"pref_beta": "train.beta"})
    if smoothing := draft.take("dpo_label_smoothing", 0):
        draft.leave_out("dpo_label_smoothing", smoothing, _NONE_SMOOTHED)
    if draft.theirs.get("adapter_name_or_path") is not None:
        draft.notes.append(
            "the reference is the model with that adapter as the run begins, not the base alone"
        )
    _finish(draft)
    return "kto" if stage == "kto" else draft.value_of("train.objective")


def _begin(draft: Draft, objective: str, loss: str | None, origin: str) -> None:
    draft.set("train.objective", objective, origin)
    if loss is not None:
        if loss not in LOSSES[objective]:
            raise draft.refuse("loss_type", loss, _ANOTHER)
        draft.set("train.loss_type", loss, origin)


def _one_loss(draft: Draft, key: str) -> str | None:
    """The loss; TRL and Axolotl take a list of them, too."""
    given: Any = draft.take(key)
    names = given if isinstance(given, list) else [] if given is None else [given]
    if len(names) > 1:
        raise draft.refuse(key, given, "is a sum of losses, which is not computed here")
    return str(names[0]) if names else None


def _smooth(draft: Draft, key: str) -> None:
    if not (smoothing := draft.take(key, 0)):
        return
    if draft.value_of("train.loss_type") in ("robust", "exo_pair"):
        draft.set("train.label_smoothing", smoothing, key)
    else:
        draft.leave_out(key, smoothing, _NONE_SMOOTHED)


def _finish(draft: Draft) -> None:
    """Leaves out what does not go together with preferences, and sets what all have alike."""
    if draft.take("disable_dropout", True):
        draft.theirs.pop("lora_dropout", None)
        draft.set("lora.lora_dropout", 0.0, "dropout is off beside preferences, TRL's default")
    for key, reason in _TERMS.items():
        if value := draft.take(key):
            draft.leave_out(key, value, reason)
    for reason, keys in _NOT_BESIDE.items():
        for key in keys.split():
            if draft.theirs.get(key):
                draft.drop(key, reason)


def settle_rows(draft: Draft, objective: str) -> None:
    """Leaves out what a file says of rows that is told by the keys of answers."""
    if objective == "sft":
        return
    for ours in ("data.format", "data.train_on"):
        if (taken := draft.taken.pop(ours, None)) is not None:
            draft.leave_out(taken.origin, taken.value, "answers are told by their keys, and alone "
                            "are compared")  # fmt: skip


def rows_of_axolotl(draft: Draft, entry: Mapping[str, Any], key: str) -> RowsOf:
    """How the rows of one of Axolotl's data sets are read."""
    kind = entry.get("type")
    template, _, rows = str(kind).partition(".")
    if not isinstance(kind, str) or rows not in _AXOLOTL_ROWS:
        if kind is not None:
            draft.leave_out(key, kind, f"answers are read by their keys; {AS_MESSAGES}")
        return RowsOf()
    if template != "chat_template":
        draft.set_template(template, key)
    columns, messages = _AXOLOTL_ROWS[rows]
    if not messages:
        draft.leave_out(key, kind, AS_MESSAGES)
    given = {ours: entry.get(theirs) for ours, theirs in _AXOLOTL_FIELDS.items()}
    renamed = {name: value for name, value in given.items() if value}
    return RowsOf.named(None, {**columns, **renamed}, f"type: {kind}")


_AXOLOTL_FIELDS = {
    "messages": "field_messages", "chosen": "field_chosen", "rejected": "field_rejected",
}  # fmt: skip
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
"""Columns by our keys, and whether they hold messages."""


def rows_of_llama_factory(
    draft: Draft, entry: Mapping[str, Any], name: str, objective: str
) -> RowsOf:
    """How the rows of one of LLaMA-Factory's data sets are read."""
    given = entry.get("columns")
    columns = given if isinstance(given, Mapping) else {}
    origin = f"dataset_info.json: {name}"
    answers = {key: columns.get(key) for key in ("chosen", "rejected")}
    judged = objective == "kto" and not entry.get("ranking")
    if judged:
        answers = {"label": columns.get("kto_tag")}
    if entry.get("formatting", "alpaca") != "alpaca":
        prompt = columns.get("messages", "conversations")
        key = "completion" if judged else "conversations"
        more = {each: columns.get(each) for each in ("system", "tools")}
        return RowsOf.named(None, {key: prompt, **answers, **more}, origin)
    draft.set("data.apply_chat_template", True, "LLaMA-Factory writes instructions as turns")
    response = {"completion": columns.get("response", "output")} if judged else {}
    prompt = {**prompt_of_llama_factory(columns), "system": columns.get("system")}
    return RowsOf.named(None, {**prompt, **answers, **response}, origin)


def prompt_of_llama_factory(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of an instruction, or the one of a prompt.

    Where some columns are named, LLaMA-Factory reads no other one: not even an ``input``.
    """
    request, extra = columns.get("prompt"), columns.get("query")
    if columns.get("history") or not columns or (request and extra):
        return {"instruction": request, "input": extra, "history": columns.get("history")}
    return {"prompt": request or extra or "instruction"}
