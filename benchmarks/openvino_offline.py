"""OpenVINO GenAI's offline speed, on request: run by `peers_offline.py`, in its own environment.

    PYTHON openvino_offline.py FOLDER SEED

Reads `prefill`, `begin N`, `steps` or `end` from each line of its input and answers `= NUMBER`,
tokens/s or 0. A decode begins with the step in which the last prompt got its first token, so no
prefill counts as decode.
"""

import random
import sys
import time

CONTEXT = 512
DECODE_STEPS = {1: 48, 8: 24, 32: 16}
CACHE_GB = 1
MOST_NEW = 480


def main(folder: str, seed: int) -> None:
    """Load, say `ready`, and measure until the input ends."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs = CACHE_GB, 32
    scheduling.max_num_batched_tokens = CONTEXT
    scheduling.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduling, "CPU")
    draw, ids = random.Random(seed), iter(range(10**9))

    def add(count: int, new: int) -> list:
        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        prompts = [[draw.randrange(100, 30_000) for _ in range(CONTEXT)] for _ in range(count)]
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        return [pipeline.add_request(next(ids), tensor, config) for tensor in tensors]

    def prefill() -> float:
        handles = add(1, 1)
        started = time.perf_counter()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        assert all(handle.can_read() for handle in handles)
        return CONTEXT / (time.perf_counter() - started)

    def begin(count: int) -> list:
        handles = add(count, MOST_NEW)
        while not all(handle.can_read() for handle in handles):
            pipeline.step()
        return handles

    def steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(DECODE_STEPS[count]):
            pipeline.step()
        return count * DECODE_STEPS[count] / (time.perf_counter() - started)

    def end(handles: list) -> None:
        for handle in handles:
            handle.cancel()
        while pipeline.has_non_finished_requests():
            pipeline.step()

    prefill()
    print("= 0", flush=True)
    handles: list = []
    for line in sys.stdin:
        what, _, count = line.strip().partition(" ")
        found = 0.0
        if what == "prefill":
            found = prefill()
        elif what == "begin":
            handles = begin(int(count))
        elif what == "steps":
            found = steps(len(handles))
        elif what == "end":
            end(handles)
        print(f"= {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0)
