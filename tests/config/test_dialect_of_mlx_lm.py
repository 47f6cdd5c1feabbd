"""mlx-lm's files, converted value by value."""

import pytest
from support.dialects import converted, reasons_of


def test_mlx_lm(place):
    (place / "mlxdata").mkdir()
    (place / "mlxdata" / "valid.jsonl").touch()
    config, _ = converted(place, "mlx_lm.yaml")
    assert (config.lora.r, config.lora.lora_alpha) == (8, 160)  # scale is alpha / r
    assert config.lora.scaling == 20
    assert config.lora.target_modules == ["q_proj", "v_proj"]
    assert config.lora.layers_to_transform == [1]
    assert config.data.train == config.data.eval == str(place / "mlxdata")
    assert (config.data.train_on, config.train.max_steps) == ("all", 1000)
    optim = config.optim
    assert (optim.lr_scheduler_type, optim.warmup_steps) == ("cosine_with_min_lr", 100)
    assert optim.lr_scheduler_kwargs == {"min_lr": 1e-7}
    assert (config.optim.weight_decay, config.optim.max_grad_norm) == (0.01, 0)
    config, conversion = converted(
        place,
        "mlx_lm.yaml",
        {"grad_accumulation_steps": 4, "mask_prompt": True, "lr_schedule": None,
         "optimizer": "adam",
         "lora_parameters": {"rank": 4, "alpha": 8, "dropout": 0.1}, "num_layers": -1,
         "fine_tune_type": "lora", "model": "mlx-community/x-4bit"},
    )  # fmt: skip
    assert (config.train.max_steps, config.eval.eval_steps) == (250, 50)
    assert (config.lora.lora_alpha, config.lora.layers_to_transform) == (8, None)
    assert (config.data.train_on, config.optim.lr_scheduler_type) == ("last_turn", "constant")
    assert (config.optim.weight_decay, config.quant.scheme) == (0, "nf4")
    assert any("--model" in note for note in conversion.notes)


def test_mlx_lm_counts_its_schedule_in_updates(place):
    schedule = {"name": "cosine_decay", "warmup": 100, "arguments": [1e-5, 1000]}
    changes = {"grad_accumulation_steps": 4, "lr_schedule": schedule}
    config, conversion = converted(place, "mlx_lm.yaml", changes)
    assert (config.train.max_steps, config.optim.warmup_steps) == (250, 100)
    # With mlx-lm after 1000 updates.
    assert any("the learning rate reaches 0 at" in note for note in conversion.notes)


@pytest.mark.parametrize(
    ("schedule", "expected", "note"),
    [
        # cosine_decay(init, decay_steps, end), linear_schedule(init, end, steps); counted after
        # the warm-up, and as long as the run is.
        (("cosine_decay", 0, [1e-4, 1000]), ("cosine", 1e-4, 0), ""),
        (("cosine_decay", 100, [1e-4, 900]), ("cosine", 1e-4, 100), ""),
        (
            ("cosine_decay", 100, [1e-4, 1000, 1e-6]),
            ("cosine_with_min_lr", 1e-4, 100),
            "would after 1100",
        ),
        (("cosine_decay", 100, [1e-4, 900, 1e-6]), ("cosine_with_min_lr", 1e-4, 100), ""),
        (("linear_schedule", 0, [1e-4, 0, 1000]), ("linear", 1e-4, 0), ""),
        (("linear_schedule", 0, [1e-4, 1e-5, 500]), ("polynomial", 1e-4, 0), "would after 500"),
        (("linear_schedule", 0, [0, 1e-4, 50]), ("constant_with_warmup", 1e-4, 50), ""),
        (("linear_schedule", 0, [1e-4, 1e-4, 50]), ("constant", 1e-4, 0), ""),
        (("step_decay", 10, [1e-4, 0.9, 10]), ("constant_with_warmup", 1e-4, 10), ""),
    ],
)
def test_mlx_lm_s_schedules(place, schedule, expected, note):
    name, warmup, arguments = schedule
    changes = {"lr_schedule": {"name": name, "warmup": warmup, "arguments": arguments}}
    config, conversion = converted(place, "mlx_lm.yaml", changes)
    optim = config.optim
    assert (optim.lr_scheduler_type, optim.learning_rate, optim.warmup_steps) == expected
    notes = [note for note in conversion.notes if "learning rate reaches" in note]
    ends = [optim.lr_scheduler_kwargs.get(key) for key in ("min_lr", "lr_end")]
    assert [end for end in ends if end] == ([1e-6] if 1e-6 in arguments else [1e-5] if note else [])
    assert len(notes) == bool(note) and all(note in each for each in notes)
    assert ("lr_schedule: step_decay" in reasons_of(conversion)) == (name == "step_decay")


def test_mlx_lm_s_services(place):
    config, conversion = converted(place, "mlx_lm.yaml", {"report_to": "swanlab,wandb"})
    assert config.log.report_to == ["wandb"] and "report_to: swanlab" in reasons_of(conversion)
    assert converted(place, "mlx_lm.yaml", {"report_to": "swanlab"})[0].log.report_to == []


def test_slices_of_one_split_do_not_measure_what_is_learnt(place):
    hub = {"path": "o/n", "train_split": "train[:90%]", "valid_split": "train[-10%:]"}
    config, conversion = converted(place, "mlx_lm.yaml", {"hf_dataset": hub})
    assert (config.data.train, config.data.eval) == ("o/n[:90%]", "o/n[-10%:]")
    hub["valid_split"] = "train[:90%]"
    config, conversion = converted(place, "mlx_lm.yaml", {"hf_dataset": [hub, {"path": "o/more"}]})
    assert [source.path for source in config.data.sources] == ["o/n[:90%]", "o/more[:80%]"]
    assert "hf_dataset: o/more" in reasons_of(conversion)
    _, conversion = converted(place, "mlx_lm.yaml", {"hf_dataset": hub})
    assert "valid_split: train[:90%]" in reasons_of(conversion)
    config, _ = converted(place, "mlx_lm.yaml", {"hf_dataset": {"path": "o/n"}})
    assert (config.data.train, config.data.eval) == ("o/n[:80%]", "o/n[-10%:]")  # its defaults


def test_prompts_and_completions_of_mlx_lm_are_turns_of_a_chat(place):
    assert converted(place, "mlx_lm.yaml")[0].data.apply_chat_template


@pytest.mark.parametrize(("given", "count"), [({}, 1), ({"model.path": "m"}, 0)])
def test_a_model_in_mlxs_format_is_noted_unless_another_is_given(place, given, count):
    changes = {"model": "mlx-community/some-4bit"}
    notes = converted(place, "mlx_lm.yaml", changes, given)[1].notes
    assert sum("in MLX's format" in note for note in notes) == count
