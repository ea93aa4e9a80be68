"""OpenVINO's logits and greedy answers: run by `fidelity.py`, in its own environment.

    PYTHON openvino_logits.py FOLDER REQUEST.json OUT

PYTHON has openvino; FOLDER is an export of optimum-intel. The CPU plugin computes by its defaults,
as OpenVINO GenAI does: dynamic rounding of activations in groups, KV in int8. Requests and results
are those of `llama_logits.py`.
"""

import json
import sys
from pathlib import Path


def main(folder: str, request: str, out: str) -> None:
    """Compute and write everything."""
    import numpy as np
    import openvino

    asked = json.loads(Path(request).read_text())
    core = openvino.Core()
    core.set_property("CPU", {"INFERENCE_NUM_THREADS": asked["threads"]})
    compiled = core.compile_model(str(Path(folder) / "openvino_model.xml"), "CPU")
    names = {name for each in compiled.inputs for name in each.names}
    infer = compiled.create_infer_request()

    def read(token_ids: list[int], before: int) -> np.ndarray:
        """Logits after these tokens, behind so many that were read before."""
        count = len(token_ids)
        inputs = {
            "input_ids": np.array([token_ids], dtype=np.int64),
            "attention_mask": np.ones((1, before + count), dtype=np.int64),
            "position_ids": np.arange(before, before + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        infer.infer({name: value for name, value in inputs.items() if name in names})
        return infer.get_tensor("logits").data[0].astype(np.float32)

    for number, window in enumerate(asked["windows"]):
        infer.reset_state()
        np.save(Path(out) / f"window-{number}.npy", read(window, 0))
    answers = []
    for prompt in asked["prompts"]:
        infer.reset_state()
        answer = [int(read(prompt, 0)[-1].argmax())]
        while len(answer) < asked["max_tokens"]:
            before = len(prompt) + len(answer) - 1
            answer.append(int(read(answer[-1:], before)[-1].argmax()))
        answers.append(answer)
    (Path(out) / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
