"""vLLM's offline speed, on request: run by `peers_offline.py`, in its own environment.

    PYTHON vllm_offline.py FOLDER

Reads `prefill`, `begin N`, `steps` or `end` from each line of its input and answers `= NUMBER`,
tokens/s or 0. A decode begins with the step in which the last prompt got its first token, so no
prefill counts as decode.
"""

import os
import random
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
MOST_NEW = 480


def main(folder: str) -> None:
    """Load, warm up, and measure until the input ends."""
    from vllm import LLM, SamplingParams

    room = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
    engine = LLM(folder, dtype="bfloat16", enable_prefix_caching=False, **room).llm_engine
    vocab = engine.model_config.get_vocab_size()
    draw, ids = random.Random(0), iter(range(10**9))

    def add(count: int, new: int) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        names = [str(next(ids)) for _ in range(count)]
        for name in names:
            prompt = [draw.randrange(100, vocab - 100) for _ in range(CONTEXT)]
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return names

    def prefill() -> float:
        add(1, 1)
        started = time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        return CONTEXT / (time.perf_counter() - started)

    def begin(count: int) -> list[str]:
        names, begun = add(count, MOST_NEW), set[str]()
        while len(begun) < count:
            begun |= {output.request_id for output in engine.step()}
        return names

    def steps(count: int) -> float:
        started, made = time.perf_counter(), 0
        for _ in range(DECODE_STEPS[count]):
            made += len(engine.step())
        return made / (time.perf_counter() - started)

    prefill()
    print("= 0", flush=True)
    names: list[str] = []
    for line in sys.stdin:
        what, _, count = line.strip().partition(" ")
        found = 0.0
        if what == "prefill":
            found = prefill()
        elif what == "begin":
            names = begin(int(count))
        elif what == "steps":
            found = steps(len(names))
        elif what == "end":
            engine.abort_request(names)
            while engine.has_unfinished_requests():
                engine.step()
        print(f"= {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
