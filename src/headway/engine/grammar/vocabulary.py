"""Vocabulary for llguidance: the bytes of each token, and the tokens that end answers.

It is built of a model's tokenizer.json, the width of the logits and the model's end tokens. Masks
are as wide as the logits, so an id without a token is never allowed.
"""

import json
from pathlib import Path

import msgspec
from llguidance import LLTokenizer

from headway.core.errors import TokenizerError
from headway.spec.model_files import read_document


class VocabularySource(msgspec.Struct, frozen=True, array_like=True):
    """Source of a vocabulary; small, so that another process can load it too."""

    model: str
    """A folder, or a GGUF file."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def load_vocabulary(source: VocabularySource) -> LLTokenizer:
    """Read and index the vocabulary: 50 ms for 512 tokens, half a second for 49,152."""
    text = json.dumps(read_document(Path(source.model), "tokenizer.json"))
    ends = [i for i in source.eos_token_ids if 0 <= i < source.vocab_size]
    try:
        try:
            return LLTokenizer(text, n_vocab=source.vocab_size, eos_token=ends or None)
        except ValueError:  # more tokens than logits: the excess bits are cut off
            return LLTokenizer(text, eos_token=ends or None)
    except (ValueError, RuntimeError) as error:
        raise TokenizerError(
            f"The tokenizer of {source.model} does not serve for structured output: "
            f"{str(error)[:200]}."
        ) from error
