"""A folder of ours, loaded by another engine: does it say what we say?

    python benchmarks/elsewhere.py OUT [OUT …] --peer PYTHON [--library vllm|transformers]

PYTHON has the library; Headway is not needed there. Both read the same windows of a book, and the
table has KL(theirs ‖ ours) in nats a token: of the 100 likeliest tokens and all others as one from
vLLM, of all from transformers. What the peer does not load is named with its last line.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOP = 100
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
Rows = list[list[int]]
Told = list[list[dict[int, float]]]
"""By row and position: token → log-probability, of position 1 on."""


def by_vllm(folder: str, rows: Rows) -> Told:
    """What vLLM expects."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        max_model_len=1024,
        enforce_eager=True,
        max_logprobs=TOP,
        gpu_memory_utilization=0.2,  # of the RAM, in spite of its name
    )
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)
    found = llm.generate([{"prompt_token_ids": row} for row in rows], asked)
    return [
        [{token: each.logprob for token, each in told.items()} for told in one.prompt_logprobs[1:]]
        for one in found
    ]


def by_transformers(folder: str, rows: Rows) -> Told:
    """What transformers expects, in the type of the folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    told: Told = []
    with torch.no_grad():
        for row in rows:
            shares = model(torch.tensor([row])).logits[0].float().log_softmax(-1)
            told.append([dict(enumerate(at)) for at in shares[:-1].tolist()])
    return told


def divergence(rows: Rows, told: Told, folder: str) -> tuple[float, float]:
    """(KL(theirs ‖ ours) in nats a token, share of positions with the same likeliest token)."""
    from headway.whole_model import FolderModel

    model = FolderModel(Path(folder), kv_memory="64MiB")
    kl, same, count = 0.0, 0, 0
    for row, theirs in zip(rows, told, strict=True):
        ours_TV = model.distributions(row)
        for at, shares in enumerate(theirs):
            kl += lumped(shares, ours_TV[at])
            same += max(shares, key=shares.__getitem__) == int(ours_TV[at].argmax())
            count += 1
    return kl / count, same / count


def lumped(theirs: dict[int, float], ours: Any) -> float:
    """KL of the tokens that are told and of the rest as one."""
    found, their_rest, our_rest = 0.0, 1.0, 1.0
    for token, share in theirs.items():
        p, q = math.exp(share), float(ours[token])
        found += p * (share - q)
        their_rest, our_rest = their_rest - p, our_rest - math.exp(q)
    rest = max(their_rest, 0.0), max(our_rest, 1e-9)
    return found + (rest[0] * math.log(rest[0] / rest[1]) if rest[0] > 1e-9 else 0.0)


def ask(peer: str, library: str, folder: str, rows: Rows) -> Told | str:
    """The peer's answer, or the error that it named instead.

    -P keeps our `kernels.py` here from being the library of that name.
    """
    with tempfile.TemporaryDirectory() as scratch:
        given, back = Path(scratch, "rows.json"), Path(scratch, "told.json")
        given.write_text(json.dumps(rows))
        words = [
            peer,
            "-P",
            __file__,
            folder,
            "--library",
            library,
            "--as-peer",
            str(given),
            str(back),
        ]
        environment = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "HOME": scratch}
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        if back.exists():
            told = json.loads(back.read_text())
            return [[{int(t): s for t, s in at.items()} for at in row] for row in told]
        said = [line for line in (done.stdout + done.stderr).splitlines() if "Error: " in line]
        return said[0][-300:] if said else f"exit status {done.returncode}"


def drawn(folder: str, data: Path, count: int, length: int) -> Rows:
    """Rows of a book, at places drawn from a seed."""
    from headway.evals.text import read_text
    from headway.frontend.text.tokenizer import Tokenizer

    tokenizer, text = Tokenizer(Path(folder)), read_text(data, "books")
    places = random.Random(0).sample(range(len(text) - 8 * length), count)
    return [tokenizer.encode(text[at : at + 8 * length])[:length] for at in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--peer", default=sys.executable)
    parser.add_argument("--library", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--as-peer", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.as_peer:
        rows = json.loads(Path(chosen.as_peer[0]).read_text())
        told = {"vllm": by_vllm, "transformers": by_transformers}[chosen.library]
        Path(chosen.as_peer[1]).write_text(json.dumps(told(chosen.folders[0], rows)))
        return
    print(f"| folder | KL({chosen.library} ‖ ours) | same token |\n| --- | ---: | ---: |")
    for folder in chosen.folders:
        rows = drawn(folder, chosen.data, chosen.rows, chosen.length)
        told = ask(chosen.peer, chosen.library, folder, rows)
        if isinstance(told, str):
            print(f"| {Path(folder).name} | not loaded: {told} | |", flush=True)
            continue
        kl, same = divergence(rows, told, folder)
        print(f"| {Path(folder).name} | {kl:.5f} | {same:.1%} |", flush=True)


if __name__ == "__main__":
    main()
