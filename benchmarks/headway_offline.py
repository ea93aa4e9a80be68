"""Headway's offline speed, on request: run by `peers_offline.py`, each source tree in its process.

    PYTHONPATH=CHECKOUT/src PYTHON headway_offline.py MODEL QUANTIZATION LOAD_FORMAT

Reads from each line of its input `prefill`, `begin N`, `steps` or `end`, and answers `= NUMBER`:
tokens/s, or 0 where there is nothing to tell.
"""

import sys

from headway import LLM
from offline import DECODE_STEPS, Rates

MAX_MODEL_LEN = 1024


def main(model: str, quantization: str, load_format: str) -> None:
    """Load, warm up, and measure until the input ends; `int4:64` is int4 in groups of 64."""
    kind, _, group = quantization.partition(":")
    llm = LLM(
        model,
        **({} if kind == "file" else {"quantization": kind}),
        **({"quantization_group": int(group)} if group else {}),
        load_format=load_format,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=32,
        skip_tokenizer_init=True,
    )
    rates, num_seqs = Rates(llm), 0
    rates.prefill()
    print("= 0", flush=True)
    for line in sys.stdin:
        what, _, count = line.strip().partition(" ")
        found = 0.0
        if what == "prefill":
            found = rates.prefill()
        elif what == "begin":
            num_seqs = int(count)
            rates.begin(num_seqs)
        elif what == "steps":
            found = rates.steps(DECODE_STEPS[num_seqs])
        elif what == "end":
            rates.end()
        print(f"= {found}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
