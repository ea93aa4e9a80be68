"""Trains the byte-level BPE tokenizer of `headway-tiny`.

It is given a folder of books and writes `tokenizer.json` into the folder `--out`.
It promises that every digit is a token of its own and that any bytes can be encoded.
"""

import argparse
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path

from recipes.tiny.books import shards
from recipes.tiny.chatml import SPECIAL_TOKENS
from recipes.tiny.conversations import conversations
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

# "It's 12 o'clock." is cut into "It", "'s", " 1", "2", " o", "'", "clock", "."
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def chat_text(num_conversations: int) -> Iterator[str]:
    """The same kind of conversations as in training, without their special tokens."""
    for pieces in islice(conversations(seed=0), num_conversations):
        text = "".join(content for content, _ in pieces)
        for token in SPECIAL_TOKENS:
            text = text.replace(token, "\n")
        yield text


def train(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A tokenizer whose first ids are the special tokens, then 256 bytes, then the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="folder of train-*.txt books")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--bytes-per-shard", type=int, default=3_000_000)
    parser.add_argument("--conversations", type=int, default=10_000)
    args = parser.parse_args()

    books = shards(args.text, args.bytes_per_shard)
    tokenizer = train(chain(books, chat_text(args.conversations)), args.vocab_size)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    print(f"{tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
