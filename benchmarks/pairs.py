"""Two models, or one with two sets of options, in turn: how many times as fast is the other?

    python benchmarks/pairs.py FOLDER OTHER [--first quantization=int4] [--second key=value] …

Prefill of 512 tokens, decodes of 1, 8 and 32 sequences of that context. In each pair both are
measured one behind the other, and who is first alternates; a row has the medians of the rates, and
the median and the quartiles of the ratios, so that a neighbour on the machine harms few pairs.
"""

import argparse
import statistics

from common import heading
from headway import LLM
from offline import CONTEXT, Rates


def given(words: list[str]) -> dict[str, str]:
    """quantization=int4 → {"quantization": "int4"}."""
    return dict(word.split("=", 1) for word in words)


def opened(folder: str, words: list[str], threads: int) -> Rates:
    llm = LLM(
        folder,
        kv_memory="320MiB",
        threads=threads,
        max_model_len=1024,
        skip_tokenizer_init=True,
        **given(words),  # type: ignore[arg-type]
    )
    return Rates(llm, CONTEXT)


def measure(rates: Rates, batch: int) -> float:
    """Tokens/s; batch 0 is the prefill."""
    return rates.decode(batch) if batch else rates.prefill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("other")
    parser.add_argument("--first", action="append", default=[], help="an option of FOLDER")
    parser.add_argument("--second", action="append", default=[], help="an option of OTHER")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--batches", default="0,1,8,32", help="sequences; 0 is the prefill")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    first = opened(chosen.folder, chosen.first, chosen.threads)
    other = opened(chosen.other, chosen.second, chosen.threads)
    print(heading(["", "first, tok/s", "other, tok/s", "times as fast", "quartiles"]))
    for batch in map(int, chosen.batches.split(",")):
        rates: list[tuple[float, float]] = []
        measure(first, batch), measure(other, batch)
        for number in range(chosen.pairs):
            if number % 2:
                back = measure(other, batch)
                rates.append((measure(first, batch), back))
            else:
                rates.append((measure(first, batch), measure(other, batch)))
        ratios = [two / one for one, two in rates]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ours, theirs = (statistics.median(each) for each in zip(*rates, strict=True))
        name = f"batch {batch}" if batch else "prefill 512"
        print(f"| {name} | {ours:.1f} | {theirs:.1f} | {middle:.2f} | {low:.2f} … {high:.2f} |")


if __name__ == "__main__":
    main()
