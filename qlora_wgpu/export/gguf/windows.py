"""Sliding windows as llama.cpp knows them: every so manieth layer sees everything."""

from __future__ import annotations

from qlora_wgpu.export.gguf.model_keys import ModelKeys


def window_keys(keys: ModelKeys) -> None:
    """Adds the window and its pattern.

    Raises:
        UnsupportedModelError: If llama.cpp has other layers slide.
    """
    windows = [attention.window for attention in keys.attentions]
    widths = {window for window in windows if window is not None}
    kind = keys.llama_cpp.windows
    if kind == "of 64 layers":  # llama.cpp knows that family's largest model by it
        kind = "periodic" if len(windows) == 64 else "none"
    if not widths and kind != "every other":
        return
    if len(widths) > 1:
        raise keys.refuse(f"windows of {len(widths)} widths")
    if kind == "none":
        [width] = widths
        keys.notes.append(
            f"llama.cpp has no sliding window for {keys.model_type} models: texts of more than "
            f"{width:,} tokens are computed otherwise there than here"
        )
        if keys.llama_cpp.label in ("LLAMA", "PHI3"):  # by which the file is read back
            keys.values["attention.sliding_window"] = width
        return
    slides = [window is not None for window in windows]
    period = _period(slides)
    if period is None or (kind == "every other" and period != 2):
        raise keys.refuse("this order of layers with and without a window")
    if widths:
        keys.values["attention.sliding_window"] = widths.pop()
    if kind == "periodic":
        keys.values["attention.sliding_window_pattern"] = period


def _period(slides: list[bool]) -> int | None:
    """The n by which each n-th layer sees everything, all others slide; 0 where all slide."""
    if all(slides):
        return 0
    period = slides.index(False) + 1
    expected = [(i + 1) % period != 0 for i in range(len(slides))]
    return period if slides == expected else None
