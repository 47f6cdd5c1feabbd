"""llama.cpp itself, by its C functions: logits and token ids of a GGUF file.

The library is the one in the package ``xllamacpp``, which is built by others and holds all of it:

    pip download --no-deps xllamacpp && unzip xllamacpp-*.whl -d FOLDER

and FOLDER/xllamacpp/xllamacpp.abi3.so is what ``LlamaCpp`` takes. Structures are passed as bytes
longer than they are, of which these places are set (llama.h of 2026).

As a script it saves the logits of some texts, with an adapter or without:
``llama_cpp.py LIBRARY MODEL ADAPTER IDS OUT``
"""

import ctypes
import json
import sys
from pathlib import Path

import numpy as np

_ROOM = 512  # bytes, more than any structure has
_NUM_CONTEXT, _NUM_BATCH, _NUM_UBATCH, _THREADS, _FLASH = 0, 4, 8, (28, 32), 52
_CACHE_TYPES = 104, 108


class _Params(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_byte * _ROOM)]

    def put(self, at, value):
        ctypes.memmove(ctypes.addressof(self) + at, ctypes.byref(ctypes.c_int32(value)), 4)


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class LlamaCpp:
    """The library."""

    def __init__(self, library):
        lib = self.lib = ctypes.CDLL(str(library))
        pointer, returned = ctypes.c_void_p, {
            "llama_model_default_params": _Params, "llama_context_default_params": _Params,
            "llama_batch_init": _Batch, "llama_decode": ctypes.c_int32,
            "llama_tokenize": ctypes.c_int32, "llama_vocab_n_tokens": ctypes.c_int32,
            "llama_get_logits_ith": ctypes.POINTER(ctypes.c_float),
            "llama_set_adapters_lora": ctypes.c_int32,
        }  # fmt: skip
        for name in (
            "llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab",
            "llama_adapter_lora_init",
        ):  # fmt: skip
            getattr(lib, name).restype = pointer
        for name, kind in returned.items():
            getattr(lib, name).restype = kind
        lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Params]
        lib.llama_init_from_model.argtypes = [pointer, _Params]
        lib.llama_decode.argtypes = [pointer, _Batch]
        lib.llama_get_logits_ith.argtypes = [pointer, ctypes.c_int32]
        lib.llama_model_get_vocab.argtypes = [pointer]
        lib.llama_vocab_n_tokens.argtypes = [pointer]
        lib.llama_adapter_lora_init.argtypes = [pointer, ctypes.c_char_p]
        lib.llama_set_adapters_lora.argtypes = [pointer, pointer, ctypes.c_size_t, pointer]
        lib.llama_model_free.argtypes = [pointer]
        lib.llama_free.argtypes = [pointer]
        lib.llama_tokenize.argtypes = [
            pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32,
            ctypes.c_bool, ctypes.c_bool,
        ]  # fmt: skip
        self.log = []
        self._callback = _LOG(lambda level, text, _: self.log.append((level, text)))
        lib.llama_log_set(self._callback, None)
        lib.llama_backend_init()

    def open(self, path):
        """A model; a RuntimeError with llama.cpp's own words where it refuses one."""
        self.log.clear()
        model = self.lib.llama_model_load_from_file(
            str(Path(path)).encode(), self.lib.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(b"".join(t for level, t in self.log if level >= 4).decode())
        return Model(self, model)


class Model:
    """An open file."""

    def __init__(self, library, model):
        self.library, self.model = library, model
        self.vocab = library.lib.llama_model_get_vocab(model)

    def close(self):
        self.library.lib.llama_model_free(self.model)

    def encode(self, text, add_special=True, parse_special=True):
        raw = text.encode()
        room = (ctypes.c_int32 * (len(raw) + 16))()
        count = self.library.lib.llama_tokenize(
            self.vocab, raw, len(raw), room, len(room), add_special, parse_special
        )
        assert count >= 0
        return list(room[:count])

    def logits(self, ids, adapter=None):
        """(tokens, vocabulary) of one text, the cache in float32."""
        lib, params = self.library.lib, self.library.lib.llama_context_default_params()
        for at in (_NUM_CONTEXT, _NUM_BATCH, _NUM_UBATCH):
            params.put(at, max(len(ids), 32))
        for at in _THREADS:
            params.put(at, 1)
        params.put(_FLASH, 0)
        for at in _CACHE_TYPES:
            params.put(at, 0)
        context = lib.llama_init_from_model(self.model, params)
        assert context, "no context"
        if adapter is not None:
            lora = lib.llama_adapter_lora_init(self.model, str(adapter).encode())
            assert lora, b"".join(text for _, text in self.library.log[-5:])
            loras, scales = (ctypes.c_void_p * 1)(lora), (ctypes.c_float * 1)(1.0)
            assert lib.llama_set_adapters_lora(context, loras, 1, scales) == 0
        batch = lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = int(token), i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        assert lib.llama_decode(context, batch) == 0
        size = lib.llama_vocab_n_tokens(self.vocab)
        rows = [
            np.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), (size,)).copy()
            for i in range(len(ids))
        ]
        lib.llama_free(context)
        return np.stack(rows)


def main(library, path, adapter, ids, out):
    model = LlamaCpp(library).open(path)
    np.save(out, np.stack([model.logits(row, adapter or None) for row in json.loads(ids)]))
    model.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
