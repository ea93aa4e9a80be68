"""Tokenizers out of GGUF metadata beside the tokenizer.json that they were written from."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import gguf_file
from headway.core.errors import TokenizerError
from headway.frontend.text import Tokenizer
from headway.frontend.text.pieces import byte_alphabet
from headway.spec import embedded
from headway.spec.gguf.tokenizer import WORDS

NUM_TEXTS = 1000
ODD = [
    "  two  spaces\n\n\nlines\t\ttabs\r\n",
    "I'll you'VE it's 'S 0 00 000 1234567 3.14 2nd",
    "日本語のテキスト,漢字 ÀÉÎõü ñandú Straße ﬁ",
    "👩\u200d👩\u200d👧 🇯🇵 😀😀 e\u0301 e\u0308\u0301 é",
    '<|im_start|>user hi<|im_end|></s><s> <unk> a_b-c/d\\e {"k": [1, 2]}',
    "for i in range(10):\n    print(i)\n ALLCAPS camelCase McDonald HTTPServer",
    "\u00a0\u2003\u3000 odd spaces !!! ??? ...",
]


def texts(path: Path, count: int = NUM_TEXTS) -> Iterator[str]:
    """Odd pieces, and pieces of every length out of a text, some joined."""
    text = path.read_text(encoding="utf-8")
    generator = random.Random(7)
    yield from ODD
    for _ in range(count - len(ODD)):
        at = generator.randrange(len(text) - 400)
        piece = text[at : at + generator.choice((1, 3, 10, 40, 150, 400))]
        yield piece + generator.choice(("", "", " ", "\n\n", generator.choice(ODD)))


@pytest.fixture(scope="session")
def sources(shared: Path) -> list[Path]:
    found = [shared / "text" / "val.txt", shared / "eval" / "wikitext-2" / "test.txt"]
    return [path for path in found if path.exists()]


def folders(shared: Path) -> dict[str, tuple[Path, str, bool]]:
    """Name → (folder, splitting of words, whether the file carries tokenizer.json)."""
    tokenizers, models_ = shared / "tokenizers", shared / "models"
    return {
        "minimind": (tokenizers / "minimind", "gpt-2", False),
        "smollm2-grafted": (tokenizers / "smollm2-grafted", "gpt-2", False),
        "stories260K": (models_ / "stories260K", "", False),
        "headway-tiny": (embedded.model_folder(None), "", True),
    }


@pytest.mark.parametrize("name", ["minimind", "smollm2-grafted", "stories260K", "headway-tiny"])
def test_thousand_texts_give_the_same_tokens(
    name: str, shared: Path, sources: list[Path], tmp_path: Path
):
    folder, pre, whole = folders(shared)[name]
    file = gguf_file.write(tmp_path / "model.gguf", gguf_file.vocabulary_of(folder, pre, whole), {})
    theirs, ours = Tokenizer(folder), Tokenizer(file)
    for source in sources:
        for text in texts(source):
            expected = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, add_special_tokens=False) == expected, text
            assert ours.decode(expected) == theirs.decode(expected)
            assert [ours.piece(i) for i in expected] == [theirs.piece(i) for i in expected]
    assert ours.special_ids == theirs.special_ids
    assert (ours.template is None) == (theirs.template is None)
    if theirs.template is not None:
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        assert ours.chat_ids(messages) == theirs.chat_ids(messages)


TEXT = "IT'S we'll  1234 a.B\n\n  helloWORLD/\n x"
SPLIT = {
    "gpt-2": "IT|'|S| we|'ll| | 1234| a|.|B|\n\n | helloWORLD|/|\n| x".split("|"),
    "smollm": "IT|'|S| we|'ll|  |1|2|3|4| a|.|B|\n\n | helloWORLD|/|\n| x".split("|"),
    "llama-bpe": "IT|'S| we|'ll| | |123|4| a|.B|\n\n| | helloWORLD|/\n| x".split("|"),
    "qwen2": "IT|'S| we|'ll| | |1|2|3|4| a|.B|\n\n| | helloWORLD|/\n| x".split("|"),
    "tekken": "IT|'S| we|'ll| | |1|2|3|4| a|.B|\n\n| | hello|WORLD|/\n| x".split("|"),
    "gpt-4o": "IT'S| we'll| | |123|4| a|.B|\n\n| | hello|WORLD|/\n| x".split("|"),
    "deepseek-v3": "IT|'S| we|'ll|  |123|4| a|.B|\n\n| | helloWORLD|/\n| x".split("|"),
}
"""Splitting → the words of TEXT, by hand: who keeps 's, pairs or triples of digits, case apart."""


@pytest.mark.parametrize("pre", SPLIT)
def test_words_are_split_as_by_hand(pre: str, tmp_path: Path):
    words = read(tmp_path, tiny(**{"tokenizer.ggml.pre": pre}))._split(TEXT)
    alphabet = byte_alphabet()
    assert [bytes(alphabet[c] for c in word).decode() for word in words] == SPLIT[pre]


def tiny(**changes: object) -> dict[str, object]:
    """Metadata of a byte-level vocabulary with three tokens beyond its bytes."""
    tokens = [*sorted(byte_alphabet()), "ab", "abc", "<|bos|>", "<think>", "[PAD260]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3, 4, 5],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 258,
        **changes,
    }


def read(path: Path, metadata: dict[str, object]) -> Tokenizer:
    kept = {key: value for key, value in metadata.items() if value is not None}
    return Tokenizer(gguf_file.write(path / "model.gguf", kept, {}))


def test_who_puts_a_first_token(tmp_path: Path):
    """As the file says; where it does not, Llama 3 does and GPT-2 does not."""
    key = "tokenizer.ggml.add_bos_token"
    for changes, first in (
        ({}, []),
        ({key: True}, [258]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [258]),
        ({"tokenizer.ggml.pre": "llama-bpe", key: False}, []),
    ):
        assert read(tmp_path, tiny(**changes)).encode("ab") == [*first, 256], changes
    ends = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 259}
    assert read(tmp_path, tiny(**ends)).encode("ab") == [256, 259]


def test_kinds_of_tokens(tmp_path: Path):
    """Control tokens are special, a user's are found in text, padding is neither; a word that is a
    token is one in Llama 3, whatever the merges say."""
    tokenizer = read(tmp_path, tiny())
    assert tokenizer.special_ids == {258}
    assert tokenizer.encode("<think>") == [259] and tokenizer.decode([259]) == "<think>"
    assert 260 not in tokenizer.encode("[PAD260]")
    assert len(tokenizer.encode("abc")) == 2
    whole = read(tmp_path, tiny(**{"tokenizer.ggml.pre": "llama-bpe"}))
    assert whole.encode("abc", add_special_tokens=False) == [257]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, r"'bert'; read from GGUF are: gpt2, llama"),
        ({"tokenizer.ggml.model": None}, "no tokenizer"),
        ({"tokenizer.ggml.pre": "falcon"}, r"'falcon'(.|\n)*qwen2"),
        ({"tokenizer.ggml.pre": None}, "splits words as"),
        ({"tokenizer.ggml.tokens": None}, "no tokens"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "no array of bytes"),
        ({"tokenizer.ggml.tokens": [b"a", b"\xff"]}, "token 1 that is not UTF-8"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types for 261 tokens"),
        ({"tokenizer.ggml.merges": None}, "no merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "not two parts"),
        ({"tokenizer.ggml.model": "llama"}, "no scores"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-1000.0] * 261},
            "same score",
        ),
        ({"tokenizer.huggingface.json": "[1]"}, "no JSON object"),
    ],
)
def test_what_is_not_read_is_named_with_a_way_out(
    changes: dict[str, object], words: str, tmp_path: Path
):
    with pytest.raises(TokenizerError, match=words) as refused:
        read(tmp_path, tiny(**changes))
    assert "--tokenizer" in refused.value.fix


def test_every_name_of_a_splitting_is_read(tmp_path: Path):
    for pre in WORDS:
        assert read(tmp_path, tiny(**{"tokenizer.ggml.pre": pre})).encode("ab")[-1] == 256
