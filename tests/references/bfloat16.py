"""How far gradients in bfloat16 are off, ours and PyTorch's, of models with weights of many seeds.

usage: python tests/references/bfloat16.py [--seeds N] [--first SEED] [case ...]

Needs torch, transformers and peft besides this project. What is exact is PyTorch's in float64. Of
each case and seed it prints the relative error of the whole gradient and that of the worst A or B:
ours in float32, ours in bfloat16, PyTorch's under autocast, and PyTorch's of a model that is
bfloat16 throughout. Ends with 1 if ours in bfloat16 is more than 1.5 times as far off as the
better of PyTorch's two, over all tensors of a case and its seeds.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import record  # noqa: E402
import seeded  # noqa: E402
from cases import CASES  # noqa: E402

from qlora_wgpu import LoraConfig, QLoRAModel, QuantConfig  # noqa: E402
from qlora_wgpu.gpu.device import Device  # noqa: E402

ALLOWED = 1.5
WAYS = ("float32", "ours", "autocast", "bfloat16")

Gradients = dict[str, np.ndarray]


def of_seed(seed, make):
    """A maker of arrays by names, as ``make`` makes them by other names."""

    def made(shapes, *rest):
        arrays = make({f"{seed}/{name}": shape for name, shape in shapes.items()}, *rest)
        return {name.partition("/")[2]: array for name, array in arrays.items()}

    return made


def torch_gradients(case, dtype, *, autocast=False):
    model, trained = record.adapted(case, dtype)
    inputs = [torch.from_numpy(array) for array in seeded.batch()]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = record.loss_of(case, model, *inputs)
    loss.backward()
    return {n.removeprefix("g:"): a for n, a in record.gradients_of(trained, "g").items()}


def our_gradients(case, dtype, exact, device):
    _, config, shapes, offset = record.make(case)
    leaves = {name.split(".")[-3] for name in exact if name.endswith(".weight")}
    lora = LoraConfig(
        r=record.rank(case), lora_alpha=record.ALPHA, target_modules=sorted(leaves),
        use_dora=case.endswith("-dora"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(record.tensors(case, shapes, offset), folder / "model.safetensors")
        quant = QuantConfig(scheme="none")
        model = QLoRAModel.from_pretrained(folder, lora, quant, dtype, device)
    model.load_adapter(record.adapter({n: list(array.shape) for n, array in exact.items()}))
    ids, mask, labels = seeded.batch()
    return model.loss_and_grads(ids, labels, mask)[1]


def errors(gradients: Gradients, exact: Gradients) -> tuple[float, float]:
    """Of the whole gradient, and of the tensor that is furthest off."""
    square = lambda arrays: sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays)  # noqa: E731
    off = {name: gradients[name] - array for name, array in exact.items()}
    each = [np.linalg.norm(off[name]) / np.linalg.norm(array) for name, array in exact.items()]
    return (square(off.values()) / square(exact.values())) ** 0.5, float(max(each))


def compared(case, seed, device):
    """Errors of every way."""
    plain = record.weights, record.adapter
    record.weights, record.adapter = (of_seed(seed, make) for make in plain)
    try:
        exact = torch_gradients(case, torch.float64)
        ways = (
            our_gradients(case, "float32", exact, device),
            our_gradients(case, "bfloat16", exact, device),
            torch_gradients(case, torch.float32, autocast=True),
            torch_gradients(case, torch.bfloat16),
        )
    finally:
        record.weights, record.adapter = plain
    return [errors(gradients, exact) for gradients in ways]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device, worse = Device(), []
    cases = args.cases or [c for c in CASES if not c.endswith((record.NF4, "-experts"))]
    print(f"{'case, seed':24}" + "".join(f"{way:>19}" for way in WAYS))
    for case in cases:
        found = []
        for seed in range(args.first, args.first + args.seeds):
            found.append(compared(case, seed, device))
            shown = "".join(f"{whole:10.2e} {worst:8.1e}" for whole, worst in found[-1])
            print(f"{case + ', ' + str(seed):24}{shown}", flush=True)
        mean = np.exp(np.log(np.array(found)).mean(0))  # (ways, 2), geometric
        ratios = mean[1] / mean[2:].min(0)
        print(f"{case:24}ours to the better of PyTorch's: {ratios[0]:.2f}, {ratios[1]:.2f}")
        if ratios[0] > ALLOWED:
            worse.append(case)
    print(f"worse than {ALLOWED} times PyTorch's: {', '.join(worse) or 'none'}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
