"""OpenVINO GenAI's answers, on request: run by `speculation_peers.py`, in its own environment.

    PYTHON openvino_speculation.py FOLDER DRAFT NUM_GUESSES

Each line of its input is {"how": "off", "lookup" or "draft", "prompt": [ids], "ends": [ids],
"max_tokens": N}; it answers with {"tokens": [ids], "seconds": from the first token to the last}.
"""

import json
import sys

MAX_NGRAM = 3
CACHE_GB = 1


def main(folder: str, draft: str, num_guesses: int) -> None:
    """Load what was asked for, say `ready`, and answer until the input ends."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    def scheduling() -> genai.SchedulerConfig:
        made = genai.SchedulerConfig()
        made.cache_size, made.max_num_seqs, made.enable_prefix_caching = CACHE_GB, 1, False
        return made

    given = {
        "off": {},
        "lookup": {"prompt_lookup": True},
        "draft": {"draft_model": genai.draft_model(draft, "CPU")} if draft != "-" else None,
    }
    pipelines = {
        how: genai.LLMPipeline(folder, "CPU", scheduler_config=scheduling(), **options)
        for how, options in given.items()
        if options is not None
    }
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = genai.GenerationConfig(max_new_tokens=asked["max_tokens"], do_sample=False)
        config.eos_token_id, config.stop_token_ids = asked["ends"][0], set(asked["ends"])
        if asked["how"] != "off":
            config.num_assistant_tokens = num_guesses
        if asked["how"] == "lookup":
            config.max_ngram_size = MAX_NGRAM
        ids = np.array([asked["prompt"]], dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = pipelines[asked["how"]].generate(inputs, config)
        metrics = result.perf_metrics
        spent_ms = metrics.get_generate_duration().mean - metrics.get_ttft().mean
        told = {"tokens": list(map(int, result.tokens[0])), "seconds": spent_ms / 1e3}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
