"""Bounds on how much longer a tokenizer can make a text, from a parsed `tokenizer.json`.

A tokenizer.json comes with a model of any origin. Its components rewrite text, and their factors
multiply: eight normalizers that each replace "a" by ten of them make 400 million characters of
"aaaa". `check_growth` refuses a tokenizer beyond bounds that published ones keep by far;
`check_text` bounds single texts for the others:

    Llama 2 (Prepend ▁, spaces become ▁)          3 times
    NFKC (ﷺ becomes 18 characters) and Metaspace   44 times
    eight times Replace a → aaaaaaaaaa             100,000,000 times, refused
"""

import base64
import struct
from collections.abc import Callable
from math import ceil, prod
from typing import Any

from headway.core.errors import RequestError
from headway.frontend.text.lengths import flat

MAX_NORMALIZED_GROWTH, MAX_SPLIT_GROWTH, MAX_DECODED_GROWTH = 256, 16, 16
"""Largest factors by which normalizers, pre-tokenizers and decoders may make a text longer."""
MAX_WORD_CHARACTERS = 1000
"""Upper bound of WordPiece's max_input_chars_per_word (quadratic time); 100 by default."""
MAX_ADDED_TOKENS = 64
"""Upper bound of the tokens that a post-processor adds to each text."""
UNCHECKED_GROWTH = 4
"""Factor of normalizers up to which single texts are not checked."""
MAX_TEXT_GROWTH, UNCHECKED_BYTES = 2, 2**20
"""Otherwise a text may become this many times longer, or this many bytes: at most one token per
byte, and a token takes 136 bytes of memory."""
UNICODE_GROWS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
"""In bytes of UTF-8, by the Unicode FAQ on normalization: U+FDFA has 3 bytes, then 33."""
GROWS = UNICODE_GROWS | {"Lowercase": 1.5, "BertNormalizer": 8, "ByteLevel": 2}
"""BertNormalizer puts spaces around Chinese, takes accents apart and lowers: 5/3 · 3 · 3/2."""


def normalizes(part: dict[str, Any]) -> float:
    """Return the factor by which one normalizer or decoder can make a text longer."""
    kind = part.get("type")
    if kind == "Replace":
        old = (part.get("pattern") or {}).get("String")
        new = len(str(part.get("content") or "").encode())
        return max(1.0, new / len(old.encode())) if old else 1.0 + new  # an expression: any match
    if kind == "Precompiled":
        return longest_replacement(part.get("precompiled_charsmap"))
    return GROWS.get(str(kind), 1)


def splits(part: dict[str, Any]) -> float:
    """Return the factor by which one pre-tokenizer can make a text longer, prefixes included."""
    if part.get("type") == "Metaspace":
        mark = len(str(part.get("replacement") or "").encode())
        return mark + mark * (part.get("prepend_scheme") != "never")
    if part.get("type") == "ByteLevel":
        return 2 + 2 * bool(part.get("add_prefix_space"))
    return 1


def longest_replacement(encoded: Any) -> float:
    """Return the bytes of the longest replacement in sentencepiece's map of characters."""
    try:
        blob = base64.b64decode(encoded)
        (size,) = struct.unpack_from("<I", blob)
        return max(1, *map(len, blob[4 + size :].split(b"\0")))
    except (TypeError, ValueError, struct.error):
        return 1  # the library refuses it


def times(part: Any, name: str, grows: Callable[[dict[str, Any]], float]) -> float:
    """Return the factor by which a component, or the parts of a Sequence, make a text longer."""
    return prod(map(grows, flat(part, name)))


def check_growth(document: dict[str, Any]) -> float:
    """Return the factor of the normalizers; ValueError if a component exceeds its bound."""
    normalized = times(document.get("normalizer"), "normalizers", normalizes)
    split = times(document.get("pre_tokenizer"), "pretokenizers", splits)
    decoded = times(document.get("decoder"), "decoders", normalizes)
    for name, size, most in (
        ("normalizer", normalized, MAX_NORMALIZED_GROWTH),
        ("pre_tokenizer", split, MAX_SPLIT_GROWTH),
        ("decoder", decoded, MAX_DECODED_GROWTH),
    ):
        if size > most:
            raise ValueError(
                f"its {name} can make a text {size:.3g} times as long, and {most} times is the "
                "most that is accepted"
            )
    word = (document.get("model") or {}).get("max_input_chars_per_word") or 0
    if word > MAX_WORD_CHARACTERS:
        raise ValueError(
            f"its max_input_chars_per_word is {word:.3g}, and {MAX_WORD_CHARACTERS} is the most "
            "that is accepted"
        )
    return normalized


def check_added(num_tokens: int) -> None:
    """Raise ValueError if a post-processor adds too many tokens to each text."""
    if num_tokens > MAX_ADDED_TOKENS:
        raise ValueError(f"its post_processor adds {num_tokens} tokens to each text")


def check_text(text: str, at_most: float, normalize: Callable[[str], str]) -> None:
    """RequestError where `text`, normalized, is beyond MAX_TEXT_GROWTH and UNCHECKED_BYTES.

    `at_most` is the factor of the normalizers. Where that may be too much, the text is normalized
    in pieces that can become `UNCHECKED_BYTES` each.
    """
    if at_most <= UNCHECKED_GROWTH or at_most * 4 * len(text) <= UNCHECKED_BYTES:
        return
    most = max(UNCHECKED_BYTES, MAX_TEXT_GROWTH * len(text.encode()))
    step = max(1, UNCHECKED_BYTES // ceil(4 * at_most))
    size = 0
    for begin in range(0, len(text), step):
        size += len(normalize(text[begin : begin + step]).encode())
        if size > most:
            raise RequestError(
                f"The model's tokenizer makes more than {most} bytes of a text of {len(text)} "
                "characters. Shorten the text.",
                param="prompt",
                code="string_above_max_length",
            )
