"""Small runs that are stopped and go on, and what their folders hold."""

from support.observing import observed

from e2e.test_training import Warnings, config, metrics, opened, rows
from qlora_wgpu import Trainer
from qlora_wgpu.training import Observer

SETTINGS = {
    "train": {"num_train_epochs": 3, "max_steps": -1},
    "log": {"logging_steps": 2},
    "output": {"save_steps": 3, "save_total_limit": None},
}


def run(folder, device, out, *, observer=None, resume=False, dataset=None, **sections):
    settings = config(folder, out, **{**SETTINGS, **sections})
    model = opened(folder, device, lora_dropout=0.1)
    dataset = rows() if dataset is None else dataset
    return Trainer(model, settings, callbacks=observed(observer), resume=resume).train(
        dataset, rows(4, seed=1)
    )


def adapter(out):
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def logged(out):
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics(out)]


class Killed(BaseException):
    """Nothing that is watched for, as a power cut is not."""


class Kill(Observer):
    """Ends the process' work at once, as a power cut does, when a step's figures arrive."""

    def __init__(self, at):
        self.at = at

    def step(self, row):
        if row["step"] >= self.at:
            raise Killed


class Told(Warnings):
    def __init__(self):
        super().__init__()
        self.notes = []

    def note(self, text):
        self.notes.append(text)


def files(out):
    return {
        str(p.relative_to(out)): p.read_bytes()
        for p in out.rglob("*")
        if p.is_file() and p.name not in (".lock", "config.yaml")
    }


def whole_run(folder, device, out):
    """A run that was never stopped."""
    assert run(folder, device, out).steps == 9
    return out
