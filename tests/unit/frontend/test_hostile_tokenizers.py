"""Hostile tokenizer.json: refused where it multiplies text; a text that breaks it fails alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import decoders

from headway.core.errors import RequestError, TokenizerError
from headway.frontend.text import Tokenizer
from headway.frontend.text.growth import UNCHECKED_BYTES
from small_tokenizers import KINDS, bytelevel


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def several(name: str, part: dict, count: int) -> dict:
    return {"type": "Sequence", name: [part] * count}


TENFOLD = replace({"String": "a"}, "a" * 10)
SPECIAL = {"id": "<|end|>", "ids": [0] * 1000, "tokens": ["<|end|>"] * 1000}
BOMBS = {
    "Replace, eight times": {"normalizer": several("normalizers", TENFOLD, 8)},
    "an expression": {"normalizer": replace({"Regex": "."}, "a" * 1000)},
    "an expression that matches nothing": {"normalizer": replace({"Regex": ""}, "a" * 300)},
    "an empty pattern": {"normalizer": replace({"String": ""}, "a" * 300)},
    "NFKD, three times": {"normalizer": several("normalizers", {"type": "NFKD"}, 3)},
    "ByteLevel, eight times": {
        "pre_tokenizer": several(
            "pretokenizers",
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            8,
        )
    },
    "a decoder": {"decoder": several("decoders", TENFOLD, 8)},
    "a thousand tokens around each text": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {"<|end|>": SPECIAL},
        }
    },
    "words without end": {
        "model": {
            "type": "WordPiece",
            "unk_token": "a",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 2**40,
            "vocab": {"a": 0},
        }
    },
}


def written(folder: Path, **parts: object) -> Path:
    document = json.loads(bytelevel(decoders.ByteLevel()).to_str())
    (folder / "tokenizer.json").write_text(json.dumps({**document, **parts}))
    return folder


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path: Path, name: str):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json .* cannot be read: its "):
        Tokenizer(written(tmp_path, **BOMBS[name]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is of Linux")
def test_a_tokenizer_that_multiplies_text_costs_little(tmp_path: Path):
    """Refused within 2 s and 1 GB of a process of its own.

    Read from /proc: ru_maxrss also counts what the forking process held until the child ran exec.
    """
    folder = written(tmp_path, **BOMBS["Replace, eight times"])
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from headway.core.errors import TokenizerError\n"
        "from headway.frontend.text import Tokenizer\n"
        "began = time.monotonic()\n"
        "try:\n"
        "    Tokenizer(Path(sys.argv[1])).encode('aaaa')\n"
        "except TokenizerError:\n"
        "    took_s = time.monotonic() - began\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    print(took_s, 1024 * int(status.split('VmHWM:')[1].split()[0]))\n"
    )
    command = [sys.executable, "-c", program, str(folder)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    seconds, used_bytes = map(float, found.stdout.split())
    assert seconds < 2 and used_bytes < 1e9


def test_an_added_token_is_not_multiplied_where_the_file_is_read(tmp_path: Path):
    """The library normalizes the content of added tokens before any text comes."""
    token = {"id": 500, "content": "aaaa", "normalized": True, "special": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    hostile = written(tmp_path, added_tokens=[token], **BOMBS["Replace, eight times"])
    with pytest.raises(TokenizerError, match="its normalizer"):
        Tokenizer(hostile)


def test_a_text_grows_to_a_bound(tmp_path: Path):
    """Hundredfold is accepted of a tokenizer, and bounded for each text."""
    tokenizer = Tokenizer(written(tmp_path, normalizer=several("normalizers", TENFOLD, 2)))
    assert len(tokenizer.encode("the a")) > 50
    assert tokenizer.encode("b" * UNCHECKED_BYTES)
    for encode in (tokenizer.encode, lambda text: tokenizer.counts([text])):
        with pytest.raises(RequestError, match="makes more than") as caught:
            encode("a" * (UNCHECKED_BYTES // 50))
        assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": replace({"Regex": ""}, "x" * 9)},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["an index", "an expression"],
)
def test_a_panic_refuses_the_text_alone(tmp_path: Path, parts: dict):
    """It is no Exception: a server's thread would end with it."""
    tokenizer = Tokenizer(written(tmp_path, **parts))
    with pytest.raises(RequestError, match="tokenizer fails on this text"):
        tokenizer.encode("a" * 40 + "b")


@pytest.mark.parametrize("kind", KINDS)
def test_usual_tokenizers_are_read(tmp_path: Path, kind: str):
    KINDS[kind]().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("the end")
