"""How long a text can be at most and still fit in so many tokens: known before it is tokenized.

Given a parsed `tokenizer.json` it tells the longest entry of the vocabulary, and how many times
longer than its tokens a text may be. That is once where every byte of a text ends up in some token;
a normalizer that rewrites text makes the bound looser, and so does all that drops text:

    byte-level BPE                       the longest entry
    … with NFC, NFKC or Lowercase        4 times that: 𝐀 has 4 bytes, the A it becomes has 1
    … with Strip, WordPiece, rstrip      16 times that: any number of spaces may vanish
"""

from collections.abc import Iterator
from typing import Any

from headway.frontend.text.pieces import byte_alphabet

LOOSER = 16
"""For text that may be shortened by any factor, and for prompts that are truncated anyway."""
UNICODE_SHRINKS = 4
SHRINKS = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"), UNICODE_SHRINKS),
    **dict.fromkeys(("Prepend", "ByteLevel"), 1),
}
"""Normalizer → how many times shorter a text can become in bytes of UTF-8."""
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that no UTF-8 has; some vocabularies lack them."""
KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that only divide a text."""


def longest_entry(document: dict[str, Any], pieces: dict[int, bytes] | None) -> int:
    """Bytes of the longest entry, at least 1; `pieces` are the tokens' bytes where known."""
    entries = [*(pieces or {}).values()]
    if not (entries and decodes_bytes(document)):  # else "Ġ" is one byte of text, as in `pieces`
        entries += entries_of(document)
    return max(1, *map(len, entries)) if entries else 1


def entries_of(document: dict[str, Any]) -> Iterator[bytes]:
    """The vocabulary as it is written: "▁friend" has 9 bytes, and so has the text "▁friend"."""
    vocabulary = document.get("model", {}).get("vocab") or {}
    for entry in vocabulary:
        yield (entry if isinstance(entry, str) else str(entry[0])).encode()
    for token in document.get("added_tokens") or []:
        yield token["content"].encode()


def decodes_bytes(document: dict[str, Any]) -> bool:
    """Whether entries are spelled in GPT-2's byte alphabet."""
    decoder = document.get("decoder")
    return any(part.get("type") == "ByteLevel" for part in flat(decoder, "decoders"))


def shrinks(document: dict[str, Any]) -> int:
    """How many times longer a text may be than the bytes of its tokens."""
    drops = any(token.get("lstrip") or token.get("rstrip") for token in added(document))
    parts = flat(document.get("pre_tokenizer"), "pretokenizers")
    if drops or not covers_all(document.get("model") or {}) or any(map(removes, parts)):
        return LOOSER
    times = 1
    for part in flat(document.get("normalizer"), "normalizers"):
        times *= rewrites(part)
    return min(times, LOOSER)


def added(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The tokens that are found in a text before anything else."""
    return document.get("added_tokens") or []


def flat(part: Any, name: str) -> list[dict[str, Any]]:
    """A component and what a Sequence is made of: {Sequence: [A, B]} → [A, B]; None → []."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [inner for child in part.get(name) or [] for inner in flat(child, name)]


def rewrites(normalizer: dict[str, Any]) -> int:
    """How many times shorter one normalizer can make a text."""
    if normalizer.get("type") == "Replace":
        old = (normalizer.get("pattern") or {}).get("String")
        grows = isinstance(old, str) and len(old.encode()) <= len(normalizer["content"].encode())
        return 1 if grows else LOOSER
    return SHRINKS.get(str(normalizer.get("type")), LOOSER)


def removes(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer may drop text."""
    kind = pre_tokenizer.get("type")
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") == "Removed"
    return kind not in KEEPS_ALL


def covers_all(model: dict[str, Any]) -> bool:
    """Whether a model has tokens for every byte; else what it does not know may vanish."""
    vocabulary = model.get("vocab") or {}
    if model.get("type") == "Unigram":
        return bool(model.get("byte_fallback"))
    if model.get("type") != "BPE":
        return False
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    each_is_one = model.get("unk_token") is not None and not model.get("fuse_unk")
    alphabet = byte_alphabet().items()
    return each_is_one or all(c in vocabulary for c, byte in alphabet if byte not in NEVER)
