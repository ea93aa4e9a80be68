"""vLLM's offline speed on a folder, as one line of JSON: run by `offline.py --peer PYTHON`.

    PYTHON vllm_offline.py FOLDER DTYPE BATCHES REPEATS        for example: qwen bfloat16 1,8,32 3

Needs an environment of its own with vLLM in it and nothing of ours. Steps are timed between the one
in which the last prompt got its first token and the end, so no prefill is counted as decode.
"""

import json
import os
import random
import statistics
import sys
import time

for key, value in {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(key, value)

CONTEXT = 512
DECODE_STEPS = {1: 48, 8: 24, 32: 16}


def main(folder: str, dtype: str, batches: list[int], repeats: int) -> None:
    """Print {"prefill": …, "batch 1": …, "batch 8": …, "batch 32": …} in tokens/s."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    engine = llm.llm_engine
    vocab = engine.model_config.get_vocab_size()
    draw = random.Random(0)
    ids = iter(range(10**9))

    def add(count: int, new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        for _ in range(count):
            prompt = [draw.randrange(100, vocab - 100) for _ in range(CONTEXT)]
            engine.add_request(str(next(ids)), {"prompt_token_ids": prompt}, params)

    def prefill() -> float:
        add(1, 1)
        started = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return CONTEXT / (time.perf_counter() - started)

    def decode(count: int) -> float:
        steps = DECODE_STEPS[count]
        add(count, steps + 40)
        have: dict[str, int] = {}
        while len(have) < count:
            have |= {out.request_id: 1 for out in engine.step()}
        started, made = time.perf_counter(), 0
        for _ in range(steps):
            made += len(engine.step())
        spent = time.perf_counter() - started
        while engine.has_unfinished_requests():
            engine.step()
        return made / spent

    prefill()
    found = {"prefill": [prefill() for _ in range(repeats)]}
    for count in batches:
        found[f"batch {count}"] = [decode(count) for _ in range(repeats)]
    print(json.dumps({name: statistics.median(values) for name, values in found.items()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(b) for b in sys.argv[3].split(",")], int(sys.argv[4]))
