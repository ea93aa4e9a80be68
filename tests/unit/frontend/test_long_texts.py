"""Long texts: cut into parts that give the same tokens, and bounded before they are tokenized."""

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from byte_tokenizer import write_tokenizer
from headway.cli.common import model_folder
from headway.frontend.text import Tokenizer, cuts, lengths

PATTERNS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-3": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen-2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
        r"\s+(?!\S)|\s+"
    ),
}
WORDS = [
    "the",
    "time",
    "Ünïcode",
    "don't",
    "12345",
    "3.14",
    "a",
    "\n",
    "\n\n",
    "  ",
    "\t",
    "，",
    "字符串",
]
WORDS += ["<|im_start|>", "x_y", "!?", "'s", "e\u0301", "한국어", "ᄒ", "ᅡ", "½", "x,y", "a.b", " "]


def with_pattern(folder: Path, pattern: str, normalizer: Any = None) -> Tokenizer:
    """A byte-level tokenizer that splits by `pattern`."""
    rust = write_tokenizer(folder, size=400)
    rust.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if normalizer is not None:
        rust.normalizer = normalizer
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module", params=[*PATTERNS, "embedded", "byte-level", "NFC"])
def cuttable(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizers whose texts can be cut."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "embedded":
        return Tokenizer(model_folder(None))
    if request.param == "byte-level":
        write_tokenizer(folder)
        return Tokenizer(folder)
    if request.param == "NFC":
        return with_pattern(folder, PATTERNS["qwen-2"], normalizers.NFC())
    return with_pattern(folder, PATTERNS[request.param])


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from(WORDS), max_size=120), glue=st.sampled_from(["", " ", "\n"]))
def test_a_text_in_parts_has_the_same_tokens(
    cuttable: Tokenizer, words: list[str], glue: str
) -> None:
    text = glue.join(words)
    parts = list(cuts.cut(text, cuttable._split, size=16))
    assert "".join(parts) == text
    joined = [i for part in parts for i in cuttable._encode(part, False)]
    assert joined == cuttable._encode(text, False)


def test_a_long_text_is_really_cut(cuttable: Tokenizer) -> None:
    text = "the engine takes requests, and 12 more\nof them. " * 3000
    parts = list(cuttable.encode_parts(text))
    assert len(parts) > 3 and max(map(len, parts)) < 2 * cuts.PIECE_CHARACTERS
    joined = [i for part in parts for i in part]
    assert joined == cuttable.encode(text) == cuttable._encode(text, True)


def test_a_text_without_words_stays_whole(cuttable: Tokenizer) -> None:
    text = "a" * 3 * cuts.PIECE_CHARACTERS
    assert list(cuts.cut(text, cuttable._split)) == [text]


def test_special_tokens_stand_at_the_ends_of_the_whole(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    rust = write_tokenizer(tmp_path)
    rust.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    text = "one two three " * 9000
    whole = tokenizer.encode(text)
    assert (whole[0], whole[-1], whole[1:-1]) == (
        1,
        2,
        tokenizer.encode(text, add_special_tokens=False),
    )
    assert whole == tokenizer._encode(text, True)


def llama_2(document: dict[str, Any]) -> None:
    document["normalizer"] = {"type": "Prepend", "prepend": "▁"}
    document["pre_tokenizer"] = None


def words_of_two(document: dict[str, Any]) -> None:
    """A splitting that joins what stands on both sides of a space."""
    document["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"\w+ \w+|."},
        "behavior": "Isolated",
        "invert": False,
    }


def greedy_specials(document: dict[str, Any]) -> None:
    document["added_tokens"][0]["rstrip"] = True


def special_phrase(document: dict[str, Any]) -> None:
    document["added_tokens"][0]["content"] = "end of text"


@pytest.mark.parametrize("change", [llama_2, words_of_two, greedy_specials, special_phrase])
def test_what_cannot_be_cut_is_not(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    tokenizer = Tokenizer(tmp_path)
    text = "one two, three four " * 9000
    assert len(list(tokenizer.encode_parts(text))) == 1


# ── bytes of a token ────────────────────────────────────────────────────────────────────────


def test_no_text_has_more_bytes_than_its_tokens_may(cuttable: Tokenizer) -> None:
    source = random.Random(5)
    for _ in range(50):
        text = "".join(source.choices([*WORDS, "é" * 9, "<|endoftext|>" * 3], k=40))
        used = cuttable.text_limit(len(cuttable.encode(text)))
        assert len(text.encode()) <= used, text


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_no_character_shrinks_more_than_is_said(form: Any) -> None:
    """Singly, and with a mark of two bytes behind, which it may swallow."""
    for number in [*range(0xD800), *range(0xE000, 0x110000)]:
        text = chr(number)
        short = len(unicodedata.normalize(form, text).encode())
        assert len(text.encode()) <= lengths.UNICODE_SHRINKS * max(short, 1), hex(number)
        composed = unicodedata.normalize("NFD", text)
        short = len(unicodedata.normalize(form, composed).encode())
        assert len(composed.encode()) <= lengths.UNICODE_SHRINKS * short, hex(number)


def loose(folder: Path, change: Callable[[dict[str, Any]], None]) -> float:
    """How many times the longest entry a changed tokenizer allows."""
    write_tokenizer(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    change(document)
    return lengths.shrinks(document)


@pytest.mark.parametrize(
    ("change", "times"),
    [
        (lambda d: None, 1),
        (lambda d: d.update(normalizer={"type": "NFC"}), 4),
        (lambda d: d.update(normalizer={"type": "Strip", "strip_left": True}), 16),
        (lambda d: d.update(normalizer={"type": "Prepend", "prepend": "_"}), 1),
        (lambda d: d["normalizer"] or d.update(normalizer=replaces(" ", "▁")), 1),
        (lambda d: d.update(normalizer=replaces("  ", " ")), 16),
        (lambda d: d.update(pre_tokenizer={"type": "WhitespaceSplit"}), 16),
        (greedy_specials, 16),
        (lambda d: d["model"]["vocab"].pop("a"), 16),
        (lambda d: d["model"].update(type="WordPiece"), 16),
    ],
)
def test_what_shortens_text_makes_the_bound_looser(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], times: int
) -> None:
    assert loose(tmp_path, change) == times


def replaces(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def test_real_tokenizers_have_the_bounds_of_their_longest_entries(shared: Path) -> None:
    """smollm2's lacks some control characters, which vanish: 16 times its longest."""
    wanted = {"minimind": 21, "smollm2-grafted": 16 * 81}
    for name, bound in wanted.items():
        assert Tokenizer(shared / "tokenizers" / name).text_limit(1) == bound, name
    assert Tokenizer(shared / "models/stories260K").text_limit(10) == 90


def test_unknown_text_in_a_unigram_model_has_no_exact_bound(tmp_path: Path) -> None:
    rust = RustTokenizer(models.Unigram([("<unk>", 0.0), ("abc", -1.0)], unk_id=0))
    rust.decoder = decoders.Metaspace()
    rust.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).text_limit(1) == 5 * lengths.LOOSER


def test_a_decoder_of_several_parts_leaves_the_longest_entry_as_it_is(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    plain = Tokenizer(tmp_path).text_limit(1)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    parts = [document["decoder"], {"type": "Fuse"}]
    document["decoder"] = {"type": "Sequence", "decoders": parts}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert Tokenizer(tmp_path).text_limit(1) >= plain > 1
