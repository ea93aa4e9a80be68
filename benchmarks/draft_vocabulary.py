"""How much of a text a drafter's list of tokens covers:

    python benchmarks/draft_vocabulary.py tokenizer.json book.txt questions.jsonl

A list is the first tokens of the vocabulary and those that came lately. Each line of a text, or
each text of a line in JSON, is a request's: a token that is not in the list when it comes could not
have been guessed, and is learned. Told is the share that could, by file, of each `--sizes` and of
the same without learning.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from headway.runtime.draft_vocabulary import TokenList


def texts_of(value: object) -> Iterator[str]:
    """All texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_of(each)


def covered(tokens: list[list[int]], listed: TokenList, learns: bool) -> float:
    """The share of tokens that were in the list when they came."""
    hits = total = 0
    for token_ids in tokens:
        for token_id in token_ids:
            hits += token_id in listed
            if learns:
                listed.saw([token_id])
        total += len(token_ids)
    return hits / total


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8_192, 16_384, 32_768])
    parser.add_argument("--most-tokens", type=int, default=250_000)
    chosen = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(chosen.tokenizer))
    tokenizer.no_truncation()
    size = tokenizer.get_vocab_size()
    print(
        f"| of {size:,} | tokens |", " | ".join(f"{n:,} | not learning" for n in chosen.sizes), "|"
    )
    print("| --- | --- |", "--- | --- |" * len(chosen.sizes))
    for path in chosen.texts:
        tokens, room = [], chosen.most_tokens
        for line in path.read_text().splitlines():
            texts = texts_of(json.loads(line)) if path.suffix == ".jsonl" else [line]
            for text in texts:
                tokens.append(tokenizer.encode(text, add_special_tokens=False).ids)
                room -= len(tokens[-1])
            if room <= 0:
                break
        shares = [
            covered(tokens, TokenList(n, size), learns)
            for n in chosen.sizes
            for learns in (True, False)
        ]
        told = " | ".join(f"{share:.3f}" for share in shares)
        print(f"| {path.name} | {sum(map(len, tokens)):,} | {told} |", flush=True)


if __name__ == "__main__":
    main()
