"""Every kernel against its reference, on all variants and on what a tuner may choose.

usage: python benchmarks/gpu_checks.py OUT [--backend NAME] [--shard I/N] [--check NAME ...]
           [--variant NAME ...] [--dtype NAME ...] [--fewest]

OUT.jsonl gets a row a check. What several profiles launch alike is checked once. With ``--fewest``
these are few checks that execute every statement of the shaders; with ``--check`` all of those.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_rows import Rows

from qlora_wgpu.gpu.device import Device
from qlora_wgpu.gpu.kernel_config import Profile
from qlora_wgpu.selfcheck.cases import Case, cases_for
from qlora_wgpu.selfcheck.coverage import covering
from qlora_wgpu.selfcheck.results import DTYPES, _result, _traced, cases_of, variants
from qlora_wgpu.selfcheck.runner import Tracer, TracingDone
from qlora_wgpu.tuning.tuner import bases, candidates


def profiles(device: Device) -> dict[str, Profile]:
    """Variants first, then the tuner's candidates for each base."""
    named = dict(variants(device))
    for base in bases(device.profile):
        for profile in candidates(base):
            if profile not in named.values():
                named[f"candidate {len(named)}"] = profile
    return named


def launched(device: Device, profile: Profile, dtype: str, case: Case) -> tuple[Any, ...]:
    """All that decides what a check computes on the device."""
    run = Tracer(device, profile, dtype, in_textures=case.in_textures)
    with suppress(TracingDone):
        case.function(run, *case.arguments)
    return tuple((each.shader.label, each.workgroups, each.params) for each in run.launches)


def few_cases_of(device: Device, profile: Profile, dtype: str) -> list[Case]:
    """Few checks that execute every statement, in the order of all."""
    traced = _traced(device, profile, dtype)
    every = frozenset[tuple[str, str]]().union(*(own.statements for own in traced.values()))
    chosen, _ = covering(every, traced)
    return [case for case in traced if case in chosen]


def work(device: Device, args: argparse.Namespace) -> Iterator[tuple[str, str, Profile, str, Case]]:
    """A shard's checks; a check is one shard's in all profiles, so that it sees what is alike."""
    shard, shards = map(int, args.shard.split("/"))
    seen: set[tuple[Any, ...]] = set()

    def cases(device: Device, profile: Profile, dtype: str) -> list[Case]:
        if args.check:  # without a trace of all others
            return [case for case in cases_for(profile) if case.check in args.check]
        return (few_cases_of if args.fewest else cases_of)(device, profile, dtype)

    for variant, profile in profiles(device).items():
        if args.variant and variant not in args.variant:
            continue
        for dtype in args.dtype:
            for index, case in enumerate(cases(device, profile, dtype)):
                if _number(case) % shards != shard:
                    continue
                launches = (dtype, case.check, launched(device, profile, dtype, case))
                if launches not in seen:
                    seen.add(launches)
                    yield f"{variant} {dtype} {case.check} {index}", variant, profile, dtype, case


def _number(case: Case) -> int:
    """Spreads checks over shards, whichever profile they are of."""
    return zlib.crc32(f"{case.check} {case.arguments} {case.in_textures}".encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--shard", default="0/1", help="which part of the checks, of how many")
    parser.add_argument("--check", nargs="*", default=[], help="these alone")
    parser.add_argument("--variant", nargs="*", default=[], help="these kernels alone")
    parser.add_argument("--dtype", nargs="*", default=DTYPES, help="operands of these types alone")
    parser.add_argument(
        "--fewest", action="store_true", help="few checks that execute every statement"
    )
    args = parser.parse_args()
    device = Device(backend=args.backend)
    rows = Rows(Path(f"{args.out}.jsonl"))
    for key, variant, profile, dtype, case in work(device, args):

        def check(
            variant: str = variant, profile: Profile = profile, dtype: str = dtype,
            case: Case = case,
        ) -> dict[str, Any]:  # fmt: skip
            result = _result(device, [case], variant, profile, dtype)
            return {**asdict(result), "shaders": sorted(result.shaders), "good": result.good}

        rows.measure(key, check)


if __name__ == "__main__":
    main()
