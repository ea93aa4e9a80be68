r"""Cuts of a long text whose parts, tokenized one by one, give the same tokens.

A tokenizer that first splits a text into words never joins two of them in a token. A text can then
be cut between two words, so that memory and time depend on the part, not on the text:

    "the quick| brown fox| jumps"     [the, Ġquick] + [Ġbrown, Ġfox] + [Ġjumps]

A cut is before a single space or comma between two letters or digits. The tokenizer's own splitting
must have a boundary at each of these, in rows of words and around the actual cut, with and without
the other side. Llama 2 has no such splitting, and Phi-3's special tokens absorb the spaces next to
them: their texts are not cut.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from headway.frontend.text.lengths import added, flat

PIECE_CHARACTERS = 32 * 1024
AROUND = 64
"""Characters on each side of a cut that are split to test it: far more than a word."""
MAX_TRIES = 32
BETWEEN = " \n,、。，"
CUT = re.compile(rf"(?<=[^\W_])[{BETWEEN}](?=[^\W_])")
PROBES = ("ab", "Ab", "AB", "é", "12", "1", "字", "か", "한")

Splits = Callable[[str], list[str]]


def splits_into_words(document: dict[str, Any]) -> bool:
    """Return whether texts can be cut with a parsed tokenizer.json."""
    model = document.get("model") or {}
    plain = model.get("type") == "BPE" and not model.get("dropout")
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    normalizers = flat(document.get("normalizer"), "normalizers")
    parts = flat(document.get("pre_tokenizer"), "pretokenizers")
    return (
        bool(plain and not affixes and parts)
        and all(part.get("type") == "NFC" for part in normalizers)
        and all(map(keeps_to_words, parts))
        and all(map(stands_alone, added(document)))
    )


def keeps_to_words(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer only divides text and adds nothing."""
    kind = pre_tokenizer.get("type")
    if kind == "Split":
        return pre_tokenizer.get("behavior") == "Isolated" and not pre_tokenizer.get("invert")
    return kind == "Digits" or (kind == "ByteLevel" and not pre_tokenizer.get("add_prefix_space"))


def stands_alone(token: dict[str, Any]) -> bool:
    """Return whether an added token is matched independently of its neighbours and never cut."""
    depends = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
    return not depends and CUT.search(token["content"]) is None


def divides(splits: Splits) -> bool:
    """Return whether a splitting has a boundary at every possible cut."""
    return all(
        splits(mark.join([word] * 5)) == splits(word) + 4 * splits(mark + word)
        for word in PROBES
        for mark in BETWEEN
    )


def cut(text: str, splits: Splits, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield the parts of `text`, of `size` characters or somewhat more; joined they are `text`."""
    start = 0
    while len(text) - start > size:
        at = next_cut(text, start + size, splits)
        if at is None:
            break
        yield text[start:at]
        start = at
    yield text[start:] if start else text


def next_cut(text: str, start: int, splits: Splits) -> int | None:
    """Return the first position from `start` on where `text` can be cut, None after some tries."""
    for number, match in enumerate(CUT.finditer(text, start)):
        if number == MAX_TRIES:
            return None
        at = match.start()
        before, after = text[max(0, at - AROUND) : at], text[at : at + AROUND]
        if splits(before + after) == splits(before) + splits(after):
            return at
    return None
