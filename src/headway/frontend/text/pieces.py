"""Bytes of each token, so that a stream of tokens becomes a stream of text without re-decoding.

A parsed `tokenizer.json` gives id → bytes for the two decoders in use: byte-level (GPT-2, Llama 3,
Qwen: the token "Ġhello" is b" hello") and sentencepiece-like (Llama 2: "▁hello" is b" hello",
"<0x0A>" is b"\\n"). Any other decoder gives None: then whole prefixes are decoded.
"""

import re
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte-level alphabet of printable characters: "Ġ" → 0x20, "a" → 0x61."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def token_bytes(document: dict[str, Any]) -> dict[int, bytes] | None:
    """Return id → bytes of all tokens of a parsed tokenizer.json, None for an unknown decoder."""
    to_bytes = DECODERS.get(decoder_kind(document.get("decoder")))
    vocabulary = document.get("model", {}).get("vocab")
    if to_bytes is None or not isinstance(vocabulary, dict):
        return None
    pieces = {token_id: to_bytes(token) for token, token_id in vocabulary.items()}
    for token in document.get("added_tokens") or []:
        pieces[token["id"]] = token["content"].encode()
    return pieces


def decoder_kind(decoder: Any) -> str:
    """Return `bytelevel`, `sentencepiece`, or "" for any other decoder."""
    if not isinstance(decoder, dict):
        return ""
    if decoder.get("type") == "ByteLevel":
        return "bytelevel"
    parts = [part.get("type") for part in decoder.get("decoders", [])]
    if parts == ["ByteLevel"]:
        return "bytelevel"
    if parts[:3] == ["Replace", "ByteFallback", "Fuse"] and decoder["decoders"][0] == {
        "type": "Replace",
        "pattern": {"String": "▁"},
        "content": " ",
    }:
        return "sentencepiece"
    return ""


def bytelevel(token: str, alphabet: dict[str, int] = byte_alphabet()) -> bytes:  # noqa: B008
    """ "Ġhello" → b" hello"; characters outside the alphabet stand for themselves."""
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """ "▁hello" → b" hello", "<0x0A>" → b"\\n"."""
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


DECODERS = {"bytelevel": bytelevel, "sentencepiece": sentencepiece}
