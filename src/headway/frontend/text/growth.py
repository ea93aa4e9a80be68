"""How much longer than its text a tokenizer may make it, from a parsed `tokenizer.json`.

A tokenizer.json comes with a model from anywhere. Its components rewrite text before it is
tokenized and after, and they multiply: eight normalizers that each replace "a" by ten of them make
400 million characters of "aaaa". `check_growth` refuses a tokenizer beyond bounds that published
ones keep by far; `check_text` bounds one text under the tokenizers that are left:

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

MOST_NORMALIZED, MOST_SPLIT, MOST_DECODED = 256, 16, 16
"""So many times longer than its input may be what normalizers, pre-tokenizers and decoders make."""
MOST_WORD = 1000
"""Characters of a word that WordPiece may look up, which takes the square of them; 100 by default.
"""
MOST_ADDED = 64
"""Tokens that a post-processor may put around each text."""
FREE_TIMES = 4
"""Normalizers that can do no more need no look at each text."""
MOST_TIMES, FREE_BYTES = 2, 2**20
"""Under others a text may become so many times longer, or so many bytes: a byte is a token at most,
and a token takes 136 bytes."""
UNICODE_GROWS = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11}
"""In bytes of UTF-8, by the Unicode FAQ on normalization: U+FDFA has 3 bytes, then 33."""
GROWS = UNICODE_GROWS | {"Lowercase": 1.5, "BertNormalizer": 8, "ByteLevel": 2}
"""BertNormalizer puts spaces around Chinese, takes accents apart and lowers: 5/3 · 3 · 3/2."""


def normalizes(part: dict[str, Any]) -> float:
    """How many times longer one normalizer or decoder can make a text."""
    kind = part.get("type")
    if kind == "Replace":
        old = (part.get("pattern") or {}).get("String")
        new = len(str(part.get("content") or "").encode())
        return max(1.0, new / len(old.encode())) if old else 1.0 + new  # an expression: any match
    if kind == "Precompiled":
        return longest_replacement(part.get("precompiled_charsmap"))
    return GROWS.get(str(kind), 1)


def splits(part: dict[str, Any]) -> float:
    """How many times longer one pre-tokenizer can make a text; a prefix goes before each word."""
    if part.get("type") == "Metaspace":
        mark = len(str(part.get("replacement") or "").encode())
        return mark + mark * (part.get("prepend_scheme") != "never")
    if part.get("type") == "ByteLevel":
        return 2 + 2 * bool(part.get("add_prefix_space"))
    return 1


def longest_replacement(encoded: Any) -> float:
    """Bytes of the longest text that sentencepiece's map of characters writes for one."""
    try:
        blob = base64.b64decode(encoded)
        (size,) = struct.unpack_from("<I", blob)
        return max(1, *map(len, blob[4 + size :].split(b"\0")))
    except (TypeError, ValueError, struct.error):
        return 1  # the library refuses it


def times(part: Any, name: str, grows: Callable[[dict[str, Any]], float]) -> float:
    """How many times longer a component and what it is a Sequence of can make a text."""
    return prod(map(grows, flat(part, name)))


def check_growth(document: dict[str, Any]) -> float:
    """How many times longer the normalizers can make a text; ValueError beyond the bounds."""
    normalized = times(document.get("normalizer"), "normalizers", normalizes)
    split = times(document.get("pre_tokenizer"), "pretokenizers", splits)
    decoded = times(document.get("decoder"), "decoders", normalizes)
    for name, size, most in (
        ("normalizer", normalized, MOST_NORMALIZED),
        ("pre_tokenizer", split, MOST_SPLIT),
        ("decoder", decoded, MOST_DECODED),
    ):
        if size > most:
            raise ValueError(
                f"its {name} can make a text {size:.3g} times as long, and {most} times is the "
                "most that is accepted"
            )
    word = (document.get("model") or {}).get("max_input_chars_per_word") or 0
    if word > MOST_WORD:
        raise ValueError(
            f"its max_input_chars_per_word is {word:.3g}, and {MOST_WORD} is the most that is "
            "accepted"
        )
    return normalized


def check_added(num_tokens: int) -> None:
    """ValueError where a post-processor adds too many tokens to each text."""
    if num_tokens > MOST_ADDED:
        raise ValueError(f"its post_processor adds {num_tokens} tokens to each text")


def check_text(text: str, at_most: float, normalize: Callable[[str], str]) -> None:
    """RequestError where `text`, normalized, is beyond MOST_TIMES and FREE_BYTES.

    `at_most` times is what the normalizers can do. Where that may be too much the text is
    normalized in pieces which can be `FREE_BYTES` each.
    """
    if at_most <= FREE_TIMES or at_most * 4 * len(text) <= FREE_BYTES:
        return
    most = max(FREE_BYTES, MOST_TIMES * len(text.encode()))
    step = max(1, FREE_BYTES // ceil(4 * at_most))
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
