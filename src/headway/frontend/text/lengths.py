"""Upper bound of the length of a text that fits in a number of tokens, before it is tokenized.

A parsed `tokenizer.json` gives the longest entry of the vocabulary and the factor by which a text
may be longer than its tokens. The factor is 1 if every byte of a text ends up in some token;
normalizers that rewrite text, and components that drop text, make the bound looser:

    byte-level BPE                       the longest entry
    … with NFC, NFKC or Lowercase        4 times that: 𝐀 has 4 bytes, the A it becomes has 1
    … with Strip, WordPiece, rstrip      16 times that: any number of spaces may vanish
"""

from collections.abc import Iterator
from typing import Any

from headway.frontend.text.pieces import byte_alphabet

LOOSER = 16
"""Factor for text that may be shortened without limit, and for prompts that are truncated."""
UNICODE_SHRINKS = 4
SHRINKS = {
    **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"), UNICODE_SHRINKS),
    **dict.fromkeys(("Prepend", "ByteLevel"), 1),
}
"""Normalizer → factor by which a text can become shorter in bytes of UTF-8."""
NEVER = {0xC0, 0xC1, *range(0xF5, 0x100)}
"""Bytes that never occur in UTF-8; some vocabularies lack them."""
KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"}
"""Pre-tokenizers that only divide a text."""


def longest_entry(document: dict[str, Any], pieces: dict[int, bytes] | None) -> int:
    """Return the bytes of the longest entry, at least 1; `pieces` are the tokens' bytes."""
    entries = [*(pieces or {}).values()]
    if not (entries and decodes_bytes(document)):  # else "Ġ" is one byte of text, as in `pieces`
        entries += entries_of(document)
    return max(1, *map(len, entries)) if entries else 1


def entries_of(document: dict[str, Any]) -> Iterator[bytes]:
    """Yield the vocabulary as written: "▁friend" has 9 bytes, as the text "▁friend"."""
    vocabulary = document.get("model", {}).get("vocab") or {}
    for entry in vocabulary:
        yield (entry if isinstance(entry, str) else str(entry[0])).encode()
    for token in document.get("added_tokens") or []:
        yield token["content"].encode()


def decodes_bytes(document: dict[str, Any]) -> bool:
    """Return whether entries are spelled in GPT-2's byte alphabet."""
    decoder = document.get("decoder")
    return any(part.get("type") == "ByteLevel" for part in flat(decoder, "decoders"))


def shrinks(document: dict[str, Any]) -> int:
    """Return the factor by which a text may be longer than the bytes of its tokens."""
    drops = any(token.get("lstrip") or token.get("rstrip") for token in added(document))
    parts = flat(document.get("pre_tokenizer"), "pretokenizers")
    if drops or not covers_all(document.get("model") or {}) or any(map(removes, parts)):
        return LOOSER
    times = 1
    for part in flat(document.get("normalizer"), "normalizers"):
        times *= rewrites(part)
    return min(times, LOOSER)


def added(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens, which are matched before all others."""
    return document.get("added_tokens") or []


def flat(part: Any, name: str) -> list[dict[str, Any]]:
    """Return a component as a list, a Sequence as its parts: {Sequence: [A, B]} → [A, B]."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [inner for child in part.get(name) or [] for inner in flat(child, name)]


def rewrites(normalizer: dict[str, Any]) -> int:
    """Return the factor by which one normalizer can make a text shorter."""
    if normalizer.get("type") == "Replace":
        old = (normalizer.get("pattern") or {}).get("String")
        grows = isinstance(old, str) and len(old.encode()) <= len(normalizer["content"].encode())
        return 1 if grows else LOOSER
    return SHRINKS.get(str(normalizer.get("type")), LOOSER)


def removes(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer may drop text."""
    kind = pre_tokenizer.get("type")
    if kind in ("Split", "Punctuation"):
        return pre_tokenizer.get("behavior") == "Removed"
    return kind not in KEEPS_ALL


def covers_all(model: dict[str, Any]) -> bool:
    """Return whether a model has tokens for every byte; else unknown text may vanish."""
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
