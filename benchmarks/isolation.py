"""Whether one key can tell from timing what another has asked:

    python benchmarks/isolation.py --pairs 1000

A server with two keys answers pairs of requests: the first key asks a prompt, then the second asks
the same one or, as often, one that nobody has asked. If the second key's times to the first token
tell the two apart, a cache has leaked. AUC is the chance that a prompt that was asked before is
answered sooner than one that was not: 0.5 is a coin (target at most 0.55). The same with
`--share-prefix-cache` is the control, which has to show the difference.
"""

import argparse
import http.client
import json
import time
from pathlib import Path

import numpy as np

from common import serving, write_json

KEYS = ("key-of-the-first", "key-of-the-second")


def ask(connection: http.client.HTTPConnection, key: str, prompt: list[int]) -> float:
    """Seconds to the answer, of one token."""
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1, "temperature": 0})
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began = time.perf_counter()
    connection.request("POST", "/v1/completions", body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return time.perf_counter() - began


def auc(asked: list[float], fresh: list[float]) -> float:
    """The chance that a time of `asked` is below one of `fresh`; ties count half."""
    below = np.subtract.outer(fresh, asked)
    return float((below > 0).mean() + 0.5 * (below == 0).mean())


def measure(model: str, pairs: int, length: int, vocab: int, *flags: str) -> dict[str, float]:
    """AUC and medians over `pairs`, half of them asked before, in random order."""
    rng = np.random.default_rng(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    keys = [f"--api-key={key}" for key in KEYS]
    with serving(model, "--served-model-name=m", *keys, *flags) as (url, _):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        for number, is_asked in enumerate(rng.permutation(pairs) % 2 == 0):
            first, other = rng.integers(3, vocab, (2, length)).tolist()
            ask(connection, KEYS[0], first)
            seconds = ask(connection, KEYS[1], first if is_asked else other)
            if number >= min(20, pairs // 10):  # the first are the server's own warming up
                times[bool(is_asked)].append(seconds)
    return {
        "pairs": pairs,
        "auc": auc(times[True], times[False]),
        "asked_ms": 1e3 * float(np.median(times[True])),
        "fresh_ms": 1e3 * float(np.median(times[False])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--vocab", type=int, default=1000, help="ids are below this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = {}
    print(f"{'':<24}{'AUC':>7}{'asked before':>15}{'fresh':>10}")
    for name, flags in (("own salts", ()), ("--share-prefix-cache", ("--share-prefix-cache",))):
        found = measure(given.model, given.pairs, given.length, given.vocab, *flags)
        results[name] = found
        print(
            f"{name:<24}{found['auc']:>7.3f}{found['asked_ms']:>12.1f} ms"
            f"{found['fresh_ms']:>7.1f} ms",
            flush=True,
        )
    write_json(given.json, results, indent=1)


if __name__ == "__main__":
    main()
