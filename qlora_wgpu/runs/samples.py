"""One text that is generated before and after training."""

from __future__ import annotations

from qlora_wgpu.data import Dataset, Tokenizer
from qlora_wgpu.generation import continuation, generate
from qlora_wgpu.generation.decoder import Decoder
from qlora_wgpu.labels import IGNORE_INDEX
from qlora_wgpu.model.qlora_model import QLoRAModel

_TOKENS = 48


class SampleText:
    """A prompt of the data, continued by the model as it is at each call.

    Attributes:
        prompt: The text to continue.
        expected: How the data goes on.
    """

    def __init__(self, model: QLoRAModel, tokenizer: Tokenizer, data: Dataset) -> None:
        """Takes the first example of a data set."""
        self._model = model
        self._tokenizer = tokenizer
        example = data[0]
        learnt = [i for i, label in enumerate(example.labels) if label != IGNORE_INDEX]
        # Before the first learnt token stands the prompt; where all is learnt, take the beginning.
        length = learnt[0] if learnt and learnt[0] > 1 else max(1, min(16, len(example) // 2))
        self._prompt = [int(i) for i in example.input_ids[:length]]
        answer = [int(i) for i in example.input_ids[length : length + _TOKENS]]
        self.prompt = tokenizer.decode(self._prompt)
        self.expected = continuation(tokenizer, self._prompt, answer)
        self._decoder = Decoder(model, len(self._prompt) + _TOKENS)

    def text(self) -> str:
        """The model's present continuation of the prompt, greedily."""
        ids = generate(
            self._model,
            self._prompt,
            max_new_tokens=_TOKENS,
            stop_ids=self._tokenizer.eos_token_ids,
            decoder=self._decoder,
        )
        return continuation(self._tokenizer, self._prompt, list(ids))
