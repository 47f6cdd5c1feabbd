"""llama.cpp's tokens a second on a GGUF file: ``llama_generate.py FILE PROMPT TOKENS THREADS``."""

import json
import sys
import time

import xllamacpp

file, prompt, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path = file
params.n_ctx = prompt + tokens + 64
params.n_gpu_layers = 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
params.warmup = True
server = xllamacpp.Server(params)


def seconds(count: int) -> tuple[float, float, dict]:
    """Seconds, those of the processor, and the answer, of so many tokens after the prompt."""
    request = {"prompt": [i * 37 % 2048 for i in range(prompt)], "n_predict": count,
               "ignore_eos": True, "temperature": 0, "cache_prompt": False}  # fmt: skip
    wall, processor = time.perf_counter(), time.process_time()
    answer = server.handle_completions(request)
    return time.perf_counter() - wall, time.process_time() - processor, answer


seconds(2)
first, longer = seconds(2), seconds(2 + tokens)
print(
    json.dumps(
        {
            "tokens_per_second": tokens / (longer[0] - first[0]),
            "cpu_seconds_per_token": (longer[1] - first[1]) / tokens,
        }
    )
)
