"""Turns books and conversations into the token files that training reads.

It is given the folder of books and the tokenizer, and a seed for the conversations.
It promises `books`, `chats`, `practice`, `tune`, `settle` and `val`, safetensors of one format.
"""

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from recipes.tiny.books import shards
from recipes.tiny.chatml import END_OF_TEXT
from recipes.tiny.conversations import WRITTEN, Piece, conversations
from safetensors.numpy import save_file
from tokenizers import Tokenizer

BATCH = 2000
CHATS = ("chats", "tune", "settle")
VARIED, VARIED_LESS = 0.35, 0.2
"""The share of conversations in `tune` and `settle` that are as frameworks write them."""


def book_pieces(texts: Iterable[str]) -> Iterator[list[Piece]]:
    """Each paragraph as one learned piece; a row of training may begin at any of them."""
    for text in texts:
        for paragraph in text.split("\n\n"):
            if paragraph.strip():
                yield [(f"{paragraph}\n\n", WRITTEN)]
        yield [(END_OF_TEXT, WRITTEN)]


def encode(
    documents: Iterator[list[Piece]], tokenizer: Tokenizer, power: float
) -> dict[str, np.ndarray]:
    """Three arrays: the tokens, how much each counts in the loss, and where documents start.

    Two documents "Hi|yes" and "Bye|no, never", learned after the bar and one token a word, are
    tokens [Hi yes Bye no , never], weights [0 1 0 .58 .58 .58] and starts [0 2] with power 1/2:
    a token of a piece of n counts 1/√n, so that an answer of one digit is not lost beside a story
    of a hundred words.
    """
    tokens, counts, starts, total = [], [], [], 0
    while batch := list(islice(documents, BATCH)):
        encodings = iter(tokenizer.encode_batch([text for doc in batch for text, _ in doc]))
        for document in batch:
            starts.append(total)
            for _, counted in document:
                ids = next(encodings).ids
                tokens.append(np.array(ids, dtype=np.int16))
                weight = counted / max(1, len(ids)) ** power
                counts.append(np.full(len(ids), weight, dtype=np.float16))
                total += len(ids)
    return {
        "tokens": np.concatenate(tokens),
        "weights": np.concatenate(counts),
        "starts": np.array(starts, dtype=np.int32),
    }


def practice(tokens: np.ndarray, num_tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Rows of repeated nonsense in the format of `encode`: what was read once is learned after.

    A piece of 3 to 40 tokens drawn from `tokens` comes two to four times, sometimes with other
    tokens between: "cat 7 the | , moon | cat 7 the" is learned in its last two tokens.
    """
    rng = np.random.default_rng(seed)
    parts, counts, starts, total = [], [], [], 0
    while total < num_tokens:
        piece = rng.choice(tokens, rng.integers(3, 41))
        known = np.full(len(piece), WRITTEN, dtype=np.float16)
        known[0] = 0
        starts.append(total)
        for time in range(rng.integers(2, 5)):
            between = rng.choice(tokens, rng.integers(1, 13) * rng.integers(0, 2))
            parts += [between, piece]
            counts += [np.zeros(len(between), dtype=np.float16), known * (time > 0)]
            total += len(between) + len(piece)
    return {
        "tokens": np.concatenate(parts),
        "weights": np.concatenate(counts).astype(np.float16),
        "starts": np.array(starts, dtype=np.int32),
    }


def save(out: Path, name: str, arrays: dict[str, np.ndarray]) -> None:
    save_file(arrays, out / f"{name}.safetensors")
    print(f"{name}: {len(arrays['tokens']):,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of train-*.txt, val.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--bytes-per-shard", type=int, default=10_000_000)
    parser.add_argument("--val-bytes", type=int, default=200_000)
    parser.add_argument("--conversations", type=int, default=200_000)
    parser.add_argument("--varied-conversations", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    sources = {
        "books": book_pieces(shards(args.text, args.bytes_per_shard)),
        "chats": islice(conversations(args.seed), args.conversations),
        "tune": islice(conversations(args.seed + 1, VARIED), args.varied_conversations),
        "settle": islice(conversations(args.seed + 2, VARIED_LESS), args.varied_conversations // 3),
        "val": book_pieces(shards(args.text, args.val_bytes, "val.txt")),
    }
    for name, documents in sources.items():
        arrays = encode(documents, tokenizer, power=0.5 if name in CHATS else 0)
        save(args.out, name, arrays)
        if name == "chats":
            tokens = arrays["tokens"]
            save(args.out, "practice", practice(tokens, len(tokens) // 8, args.seed))


if __name__ == "__main__":
    main()
