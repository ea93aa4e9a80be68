"""Turns books and conversations into the token files that training reads.

It is given the folder of books and the tokenizer, and a seed for the conversations.
It promises `books.safetensors`, `chats.safetensors` and `val.safetensors` in one format.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of train-*.txt, val.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--bytes-per-shard", type=int, default=10_000_000)
    parser.add_argument("--val-bytes", type=int, default=200_000)
    parser.add_argument("--conversations", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    sources = {
        "books": book_pieces(shards(args.text, args.bytes_per_shard)),
        "chats": islice(conversations(args.seed), args.conversations),
        "val": book_pieces(shards(args.text, args.val_bytes, "val.txt")),
    }
    for name, documents in sources.items():
        arrays = encode(documents, tokenizer, power=0.5 if name == "chats" else 0)
        save_file(arrays, args.out / f"{name}.safetensors")
        print(f"{name}: {len(arrays['tokens']):,} tokens")


if __name__ == "__main__":
    main()
