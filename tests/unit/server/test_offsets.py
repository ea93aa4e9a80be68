"""`text_offset`: the offsets of tokens are those of the text that is shown."""

import json

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer

from headway.frontend.text import Tokenizer
from headway.server.openai.offsets import Offsets, prompt_offsets

TEXT = "Once é"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes for tokens, and <s> before every text, as Llama's tokenizer has it."""
    folder = tmp_path_factory.mktemp("offsets")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, **{letter: i for i, letter in enumerate(alphabet, 1)}}
    rust = RustTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<s>", special=True)])
    rust.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    rust.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer(folder)


def test_a_token_that_was_added_takes_no_room(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert ids[0] == 0 and len(ids) == 8, "<s>, five letters, two bytes of é"
    assert tokenizer.offsets(TEXT) == [0, 0, 1, 2, 3, 4, 5, 6]
    assert tokenizer.offsets(TEXT, add_special_tokens=False) == [0, 1, 2, 3, 4, 5, 6]
    assert tokenizer.offsets("<s>a") == [0, 3], "one that was typed is not added again"


def test_ids_take_the_room_of_what_shows(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    assert prompt_offsets(tokenizer, ids, TEXT, hides=True) == [0, 0, 1, 2, 3, 4, 5, 5]
    assert prompt_offsets(tokenizer, ids, "<s>" + TEXT, hides=False) == [0, 3, 4, 5, 6, 7, 8, 8]


def test_pieces_of_a_stream_go_on_where_the_last_ended(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    offsets = Offsets(tokenizer, hides=True, at=10)
    assert [offsets.place([token]) for token in ids] == [
        *([10], [10], [11], [12], [13], [14], [15], [15])
    ]
    assert offsets.at == 16


def test_a_dropped_first_space_is_not_counted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" " + TEXT, add_special_tokens=False)
    assert prompt_offsets(tokenizer, ids, TEXT, hides=True) == [0, 0, 1, 2, 3, 4, 5, 5]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert Offsets(None, hides=True).place([5, 6]) == [0, 0]
