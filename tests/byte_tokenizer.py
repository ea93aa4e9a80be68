"""A small byte-level tokenizer, trained on the spot and written as a Hugging Face folder.

It has every byte, some merges that JSON likes, and three special tokens; no torch is needed.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS = 0
CORPUS = [
    '{"name": "Anna", "age": 7, "tags": ["one", "two"], "ok": true, "none": null}',
    '{"type": "object", "properties": {"city": "Paris", "count": 12}, "items": [1, 2, 3]}',
    "the engine takes requests and the scheduler forms the next step from them",
]


def write_tokenizer(folder: Path, size: int = 320) -> Tokenizer:
    """Write tokenizer.json to `folder`; `size` counts the special tokens and the 256 bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
