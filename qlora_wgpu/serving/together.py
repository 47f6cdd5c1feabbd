"""Answers of one request, which grow beside one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from qlora_wgpu.serving.writer import Answer, Piece


async def together(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yields pieces as they come, each with its answer's number, until all have ended.

    Whoever stops earlier leaves the answers to nobody.

    Raises:
        QLoRAError: If one could not be computed.
    """
    pieces: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()

    async def pass_on(number: int, answer: Answer) -> None:
        try:
            async for piece in answer.pieces():
                pieces.put_nowait((number, piece))
        except Exception as err:  # told to whoever reads the pieces
            pieces.put_nowait((number, err))

    tasks = [asyncio.create_task(pass_on(*each)) for each in enumerate(answers)]
    growing = len(answers)
    try:
        while growing:
            number, piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            growing -= piece.finish_reason is not None
            yield number, piece
    finally:
        for answer in answers:
            answer.is_wanted = False
        for task in tasks:
            task.cancel()
