"""Text in and out: a stream of tokens against the decoder that sees them all, and chat templates.

Small tokenizers are made here, one per kind of decoder; the real ones are read where they are.
"""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, processors

from headway.core.errors import RequestError
from headway.frontend.text import TextStream, Tokenizer
from headway.frontend.text.pieces import byte_alphabet
from small_tokenizers import KINDS, bytelevel

TEXTS = [
    "The quick brown fox.",
    "日本語のテキスト、中文，한국어",
    "😀👩‍👩‍👧‍👦🇯🇵 e\u0301 naïve",
    "  two  spaces\n\ttab\r\n",
    "\u202emirrored\u0000nul \ufffd real replacement",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ ꙮ",
    "",
]
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """kind → a tokenizer of that kind, read from its folder."""
    made = {}
    for kind, build in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        build().save(str(folder / "tokenizer.json"))
        made[kind] = Tokenizer(folder)
    return made


@pytest.fixture(scope="module", params=["minimind", "smollm2-grafted", "stories260K"])
def real_folder(request, shared):
    kind = "models" if request.param == "stories260K" else "tokenizers"
    return shared / kind / request.param


@pytest.fixture(scope="module")
def real(real_folder):
    return Tokenizer(real_folder)


def cut(ids: list[int], at: list[int]) -> list[list[int]]:
    """`ids` in pieces that begin at the positions `at`."""
    borders = sorted({position % (len(ids) + 1) for position in at} | {0, len(ids)})
    return [ids[a:b] for a, b in pairwise(borders)] or [ids]


def stream(tokenizer, parts, prompt=(), **rules) -> tuple[list[str], TextStream]:
    """The pieces of text that the parts become, with `last` on the last."""
    text = TextStream(tokenizer, list(prompt), **{"stop": [], **rules})
    return [text.push(part, n == len(parts)) for n, part in enumerate(parts, 1)], text


def stopped(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """What must come out of `text`: cut at the stop that ends first, the longest of them."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, at = min(ends)
    return text[: end if include else at], text[at:end]


def as_whole_text(tokenizer: Tokenizer, text: str) -> str:
    """Sentencepiece decoders take the space off the front of a whole text; a stream goes on."""
    return text.removeprefix(" ") if tokenizer.token(3) == "<0x00>" else text


cuts = st.lists(st.integers(0, 200), max_size=12)
some_text = st.text(
    st.sampled_from("the END日é😀 \n<b") | st.characters(codec="utf-8"), max_size=24
)


def test_the_three_kinds_are_told_apart(small):
    assert small["bytelevel"].pieces is not None
    assert small["sentencepiece"].pieces is not None
    assert small["unknown"].pieces is None


@pytest.mark.parametrize("kind", ["bytelevel", "unknown"])
@given(data=st.data(), at=cuts, skip=st.booleans())
def test_pieces_add_up_for_any_tokens(small, kind, data, at, skip):
    """Any ids at all, valid UTF-8 or not, cut anywhere: the sum is the decoded text."""
    tokenizer = small[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    pieces, _ = stream(tokenizer, cut(ids, at), skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(text=some_text, at=cuts)
def test_no_piece_holds_half_a_character(small, kind, text, at):
    """Text there and back; a replacement character would be half of another."""
    text = text.replace(REPLACEMENT, "")
    tokenizer = small[kind]
    ids = tokenizer.encode(text)
    pieces, _ = stream(tokenizer, cut(ids, at))
    assert not any(REPLACEMENT in piece for piece in pieces)
    joined = "".join(pieces)
    assert (joined.removeprefix(" ") if kind == "sentencepiece" else joined) == text


@given(data=st.data(), at=cuts)
def test_sentencepiece_for_any_tokens(small, data, at):
    """As the decoder has it, but for the space it takes off the front of a whole text."""
    tokenizer = small["sentencepiece"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=16))
    expected = tokenizer.decode(ids)
    pieces, _ = stream(tokenizer, cut(ids, at))
    if REPLACEMENT not in expected:  # the decoder replaces a whole run, we only the bad bytes
        assert as_whole_text(tokenizer, "".join(pieces)) == expected


@pytest.mark.parametrize("kind", KINDS)
@given(
    text=some_text,
    at=cuts,
    stops=st.lists(st.text("theEND日 ", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_stop_strings(small, kind, text, at, stops, include):
    """However the tokens arrive, the text ends at the same place and never shows the stop."""
    tokenizer = small[kind]
    ids = tokenizer.encode(text)
    parts = cut(ids, at)
    whole = "".join(stream(tokenizer, [ids])[0])
    pieces, state = stream(tokenizer, parts, stop=stops, include_stop=include)
    expected, found = stopped(whole, stops, include)
    assert ("".join(pieces), state.stopped) == (expected, found)
    if not include:
        assert not any(stop in "".join(pieces) for stop in stops)
    assert state.push(ids, True) == "" or found is None


def test_text_is_held_no_longer_than_it_may_begin_a_stop(small):
    """The example of the module, byte by byte."""
    tokenizer = small["bytelevel"]
    text = TextStream(tokenizer, [], stop=["END"])
    shown = [text.push(tokenizer.encode(part)) for part in ("the E", "gg EN", "D.")]
    assert shown == ["the ", "Egg ", ""]
    assert text.stopped == "END"
    text = TextStream(tokenizer, [], stop=["END"])
    assert text.push(tokenizer.encode("the EN")) == "the "
    assert text.push([], True) == "EN"
    assert text.stopped is None


def test_stop_that_ends_first_wins(small):
    """One token or five, "abcde" stops at "bcd"."""
    tokenizer = small["bytelevel"]
    ids = tokenizer.encode("abcde")
    for parts in ([ids], [[i] for i in ids]):
        pieces, state = stream(tokenizer, parts, stop=["abcde", "bcd"])
        assert ("".join(pieces), state.stopped) == ("a", "bcd")


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    free=st.integers(0, 12),
)
def test_no_stop_ends_within_the_first_tokens(small, text, stops, free):
    """It ends the text where it ends behind them, wherever it begins."""
    tokenizer = small["bytelevel"]
    ids = tokenizer.encode(text)
    shown = TextStream(tokenizer, [], stop=stops)
    pieces = [shown.push([i], may_stop=n > free) for n, i in enumerate(ids, 1)]
    pieces.append(shown.push([], True))
    bare = len(tokenizer.decode(ids[:free]))
    ends = [
        (at + len(stop), at)
        for stop in stops
        for at in range(len(text))
        if text.startswith(stop, at) and at + len(stop) > bare
    ]
    end, at = min(ends, default=(len(text), len(text)))
    assert ("".join(pieces), shown.stopped) == (text[:at], text[at:end] or None)


def test_half_a_character_at_the_end_is_told_with_the_last(small):
    for kind in ("bytelevel", "unknown"):
        tokenizer = small[kind]
        euro = tokenizer.encode("€")
        assert len(euro) == 3
        text = TextStream(tokenizer, [], stop=[])
        assert text.push(euro[:2]) == ""
        assert text.push([], True) == REPLACEMENT


def test_special_tokens(small):
    tokenizer = small["bytelevel"]
    (end,) = tokenizer.encode("<|end|>")
    (think,) = tokenizer.encode("<think>")
    assert end in tokenizer.special_ids
    assert think not in tokenizer.special_ids
    ids = [*tokenizer.encode("the"), think, end]
    for parts in ([ids], [[i] for i in ids]):
        assert "".join(stream(tokenizer, parts)[0]) == "the<think>"
        shown, _ = stream(tokenizer, parts, skip_special_tokens=False)
        assert "".join(shown) == "the<think><|end|>"
    assert tokenizer.piece(end) == b"<|end|>"


def test_slow_way_goes_on_behind_the_prompt(small):
    """The context before the first token decides how it reads; it is not shown again."""
    tokenizer = small["unknown"]
    prompt, ids = tokenizer.encode("the egg 😀"), tokenizer.encode(" and 日本")
    pieces, _ = stream(tokenizer, [[i] for i in ids], prompt)
    assert "".join(pieces) == " and 日本"


def test_ids_beyond_the_vocabulary_are_silent(small):
    """The logits may be wider than the tokenizer: such a token has no text."""
    for tokenizer in small.values():
        assert "".join(stream(tokenizer, [[100_000], [100_001, 100_002]])[0]) == ""
        assert (tokenizer.token(100_000), tokenizer.piece(100_000)) == ("", b"")


def test_byte_alphabet_is_complete():
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["a"], alphabet["Ċ"]) == (0x20, 0x61, 0x0A)


# ── the real tokenizers ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_token_by_token(real, text):
    ids = real.encode(text, add_special_tokens=False)
    pieces, _ = stream(real, [[i] for i in ids] or [[]])
    assert as_whole_text(real, "".join(pieces)) == real.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(data=st.data(), at=cuts)
def test_real_tokenizer_on_random_text(real, data, at):
    """Random bytes as text, and random ids, which are seldom valid UTF-8."""
    raw = data.draw(st.binary(max_size=48)).decode("utf-8", "replace")
    ids = real.encode(raw, add_special_tokens=False)
    ids += data.draw(st.lists(st.integers(0, real.vocab_size - 1), max_size=16))
    expected = real.decode(ids)
    joined = "".join(stream(real, cut(ids, at))[0])
    if real.token(3) != "<0x00>" or REPLACEMENT not in expected:
        assert as_whole_text(real, joined) == expected


def test_real_pieces_are_the_tokens(real):
    """Every ordinary token's bytes, followed by another, are what decoding the pair adds."""
    (anchor,) = [i for i in range(real.vocab_size) if real.token(i) == "a"]
    for token_id in range(0, real.vocab_size, max(1, real.vocab_size // 500)):
        if token_id in real.special_ids:
            continue
        whole = real.decode([anchor, token_id])
        if REPLACEMENT not in whole:
            assert b"a" + real.piece(token_id) == whole.encode()


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


def test_text_that_is_no_unicode(small):
    with pytest.raises(RequestError, match="not valid Unicode") as caught:
        small["bytelevel"].encode("lone \ud800 surrogate")
    assert caught.value.param == "prompt"


def test_padding_and_truncation_of_the_file_are_ignored(tmp_path):
    """Some folders were saved with both on: prompts must not be cut or filled."""
    rust = bytelevel(decoders.ByteLevel())
    rust.enable_truncation(3)
    rust.enable_padding(length=50)
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the egg and the end of it")) == (
        "the egg and the end of it"
    )


def test_stream_time_does_not_grow_with_the_text(small):
    """Ten times the tokens hold the same few: the state of a stream is bounded."""
    tokenizer = small["unknown"]
    text = TextStream(tokenizer, [], stop=["never there"])
    for token_id in tokenizer.encode("the egg and the end of the END. " * 50):
        text.push([token_id])
        assert len(text._tail) + len(text._waiting) < 12
        assert len(text._held) < len("never there")


def test_a_text_that_begins_with_bos_gets_it_once(tmp_path):
    """As vLLM warns of: templates and clients of /v1/completions often write it themselves."""
    rust = bytelevel(decoders.ByteLevel())
    rust.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>",
        special_tokens=[(name, rust.token_to_id(name)) for name in ("<|start|>", "<|end|>")],
    )
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    start, end = (rust.token_to_id(name) for name in ("<|start|>", "<|end|>"))
    for text in ("the egg", "the egg " * 9000):
        plain = tokenizer.encode(text)
        assert plain[0] == start and plain[-1] == end and plain.count(start) == 1
        assert tokenizer.encode("<|start|>" + text) == plain
        assert len(tokenizer.offsets("<|start|>" + text)) == len(plain)
    twice = tokenizer.encode("<|start|><|start|>the")
    assert twice.count(start) == 2, "what a client writes twice is there twice"
    assert tokenizer.encode("<|start|>the", add_special_tokens=False).count(start) == 1
