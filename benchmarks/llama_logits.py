"""llama.cpp's logits and greedy answers: run by `fidelity.py`, in its own environment.

    PYTHON llama_logits.py MODEL.gguf REQUEST.json OUT

PYTHON has llama-cpp-python. REQUEST.json has `windows` and `prompts` of token ids, `max_tokens` and
`threads`. Writes OUT/window-N.npy, fp32 (tokens, vocabulary), and OUT/answers.json.
"""

import json
import sys
from pathlib import Path


def main(model: str, request: str, out: str) -> None:
    """Compute and write everything."""
    import numpy as np
    from llama_cpp import Llama

    asked = json.loads(Path(request).read_text())
    windows, prompts, max_tokens = asked["windows"], asked["prompts"], asked["max_tokens"]
    longest = max([*map(len, windows), *(len(prompt) + max_tokens for prompt in prompts)])
    threads = {"n_threads": asked["threads"], "n_threads_batch": asked["threads"]}
    llama = Llama(
        model, n_ctx=longest + 8, n_batch=longest, logits_all=True, verbose=False, **threads
    )

    def read(token_ids: list[int]) -> np.ndarray:
        """Logits after the tokens that are new, behind those that were read before."""
        llama.eval(token_ids)
        return llama.scores[llama.n_tokens - len(token_ids) : llama.n_tokens]

    for number, window in enumerate(windows):
        llama.reset()
        np.save(Path(out) / f"window-{number}.npy", read(window))
    answers = []
    for prompt in prompts:
        llama.reset()
        answer = [int(read(prompt)[-1].argmax())]
        while len(answer) < max_tokens:
            answer.append(int(read(answer[-1:])[-1].argmax()))
        answers.append(answer)
    (Path(out) / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
