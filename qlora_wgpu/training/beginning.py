"""What a call wants of the run that is in its folder."""

from __future__ import annotations

from dataclasses import dataclass

from qlora_wgpu.errors import ConfigError


@dataclass(frozen=True)
class Beginning:
    """What becomes of a run that is in ``output.dir``.

    Attributes:
        overwrite: Whether it may be replaced.
        resume: Whether it goes on.
    """

    overwrite: bool
    resume: bool

    def asked(self, overwrite: bool | None, resume: bool | None) -> Beginning:
        """What one call asks for; of what it does not say, this holds unless it asks otherwise.

        Raises:
            ConfigError: If both are asked for.
        """
        asked = Beginning(
            not resume and self.overwrite if overwrite is None else overwrite,
            not overwrite and self.resume if resume is None else resume,
        )
        if asked.overwrite and asked.resume:
            raise ConfigError("overwrite and resume exclude each other: choose one")
        return asked
