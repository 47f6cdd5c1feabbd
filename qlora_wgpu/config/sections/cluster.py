"""The section of several GPUs and machines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qlora_wgpu.config.section import Section
from qlora_wgpu.config.values import Scheduler, Text, Workers


class ClusterConfig(Section):
    """Training on several GPUs and machines, through Dask distributed."""

    scheduler: Scheduler = Field(
        None,
        description="Where the workers are: null for this process alone, local for processes on "
        "this machine, or the address of a Dask scheduler, tls://HOST:PORT (pip install "
        "'qlora-wgpu[cluster]').",
    )
    workers: Workers = Field(
        "auto",
        description="Number of worker processes with local, else how many workers to wait for "
        "before training begins; auto is one for each GPU of this machine, else those that are "
        "there, at least one.",
    )
    division: Literal["measured", "fixed"] = Field(
        "measured",
        description="Which worker computes which micro-batch: the one that is expected to be done "
        "soonest (measured), or in turn by their names (fixed), so that a rerun on unlike GPUs "
        "has the same bits.",
    )
    patience: float = Field(
        600.0,
        gt=0,
        description="Seconds without any progress, as when no worker is left, after which the run "
        "ends with its state saved.",
    )
    certificates: Text | None = Field(
        None,
        description="Folder with ca.pem, cert.pem and key.pem for tls://, or null for what Dask's "
        "own configuration says.",
    )
    allow_plain_tcp: bool = Field(
        False,
        description="Whether a tcp:// scheduler on another machine is used, although anyone on "
        "the network could then run code on all machines.",
    )
