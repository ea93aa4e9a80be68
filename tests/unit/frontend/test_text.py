"""Text in and out: a stream of tokens against the decoder that sees them all, and chat templates.

Small tokenizers are made here, one per kind of decoder; the real ones are read where they are.
"""

import json
import warnings
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer

from headway.core.errors import ModelError, RequestError, TokenizerError
from headway.frontend.text import TextStream, Tokenizer
from headway.frontend.text.pieces import byte_alphabet
from headway.frontend.text.template import ChatTemplate

CORPUS = [
    "the egg and the end of the END. ",
    "日本語のテキスト ",
    "naïve café 😀👩‍👩‍👧 🇯🇵 ",
    "<b> & 'x' ",
] * 3
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
SPECIALS = ["<|end|>", "<|start|>"]


def bytelevel(decoder) -> RustTokenizer:
    """A byte-level BPE of 400 tokens, so that most characters take several."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoder
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_tokens([AddedToken("<think>", special=False)])
    return rust


def sentencepiece() -> RustTokenizer:
    """Llama 2's kind: ▁ for spaces, <0x0A> for bytes that have no token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += ["t", "h", "e", "n", "d", "th", "the", "▁the", "日", "é", "▁▁"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁")]
    rust = RustTokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    rust.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    rust.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    return rust


def unknown() -> RustTokenizer:
    """Byte-level bytes behind a decoder whose name we do not know: the slow way."""
    return bytelevel(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))


KINDS = {
    "bytelevel": lambda: bytelevel(decoders.ByteLevel()),
    "sentencepiece": sentencepiece,
    "unknown": unknown,
}


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


# ── chat templates ──────────────────────────────────────────────────────────────────────────────

USER = {"role": "user", "content": 'Wie geht\'s? <b>&"日本" 😀'}
TOOL = {
    "type": "function",
    "function": {
        "name": "wetter",
        "description": "Das Wetter, für <heute> & morgen",
        "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln"}}}
    ],
}
CONVERSATIONS = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER],
    [USER, {"role": "assistant", "content": "Good."}, {"role": "user", "content": "And you?"}],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nGood."}, USER],
    [USER, CALL, {"role": "tool", "content": '{"t": 20}'}],
]


@pytest.fixture(scope="module", params=["minimind", "smollm2-grafted"])
def both(request, shared):
    """Our tokenizer and transformers', of one folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        folder = shared / "tokenizers" / request.param
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return Tokenizer(folder), theirs


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"open_thinking": True}], ids=str)
def test_template_as_transformers_renders_it(both, messages, generate, options):
    ours, theirs = both
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=generate, **options
    )
    assert ours.render(messages, add_generation_prompt=generate, **options) == expected
    ids = theirs.apply_chat_template(messages, add_generation_prompt=generate, **options)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    assert ours.chat_ids(messages, add_generation_prompt=generate, **options) == ids


@pytest.mark.parametrize("start", ["The answer", "e", "m", "Good. ", "two\nlines", "im_end", " x"])
def test_continued_message_as_transformers_renders_it(both, start):
    """Also where the text is found again behind the message: "e" is in <|im_end|>."""
    ours, theirs = both
    messages = [USER, {"role": "assistant", "content": start}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.render(messages, continue_final_message=True) == expected


def template(source: str, **special) -> ChatTemplate:
    return ChatTemplate(source, special)


def test_continued_message():
    chat = template("{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}")
    messages = [USER, {"role": "assistant", "content": ""}]
    assert chat.render(messages, continue_final_message=True).endswith("[end]\n[assistant]")
    messages[-1]["content"] = "nd"
    assert chat.render(messages, continue_final_message=True).endswith("[assistant]nd")
    assert messages[-1]["content"] == "nd", "the caller's messages were changed"
    trimming = template("{{ messages[-1].content | trim }}</s>")
    last = [{"role": "assistant", "content": "one two  "}]
    assert trimming.render(last, continue_final_message=True) == "one two"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages | length }}", [{"role": "assistant", "content": "x"}]),
        ("{{ messages[-1].content }}", [{"role": "assistant", "content": None}]),
        ("{{ messages[-1].content }}", [{"role": "assistant"}]),
        ("{{ messages[-1].content }}", []),
    ],
)
def test_what_cannot_be_continued(source, messages):
    with pytest.raises(RequestError) as caught:
        template(source).render(messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.there }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ {1: messages} | tojson(sort_keys=5, indent=messages) }}",
        "{{ '%d' % 'x' }}",
        "{{ 'x'.encode('no such codec') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ dict(a=1).popitem() }}",
    ],
)
def test_what_a_template_raises_refuses_the_request(source):
    with pytest.raises(RequestError, match="template refuses") as caught:
        template(source).render([USER])
    assert (caught.value.param, caught.value.status) == ("messages", 400)


def test_refusal_says_the_template_s_words():
    with pytest.raises(RequestError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render([USER])


def test_json_in_templates():
    """Jinja's own filter would write \\u003cb\\u003e."""
    value = {"b": "<b> & 日本", "a": 1}
    chat = template("{{ messages | tojson }}|{{ messages | tojson(indent=1, sort_keys=true) }}")
    plain, pretty = chat.render([value]).split("|")
    assert plain == json.dumps([value], ensure_ascii=False)
    assert pretty == json.dumps([value], ensure_ascii=False, indent=1, sort_keys=True)
    spaced = template("{{ messages | tojson(separators=(',', ':')) }}")
    assert spaced.render([value]) == '[{"b":"<b> & 日本","a":1}]'


def test_special_tokens_and_blocks():
    chat = template("{{ bos_token }}\n  {% if tools %}\ntools\n  {% endif %}\nend", bos_token="<s>")
    assert chat.render([USER]) == "<s>\nend"
    assert chat.render([USER], tools=[TOOL]) == "<s>\ntools\nend"
    assert len(template("{{ strftime_now('%Y') }}").render([])) == 4
    loop = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}x{% endfor %}"
    assert template(loop).render([USER, USER]) == "x"


# ── folders ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path):
    """A model folder with a small tokenizer and no template."""
    bytelevel(decoders.ByteLevel()).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def config(folder, **content) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def test_where_the_template_comes_from(folder, tmp_path):
    """The operator's file, chat_template.jinja, the config, chat_template.json: the first."""
    (folder / "chat_template.json").write_text('{"chat_template": "json"}')
    assert Tokenizer(folder).render([]) == "json"
    config(folder, chat_template=[{"name": "default", "template": "named"}])
    assert Tokenizer(folder).render([]) == "named"
    config(folder, chat_template="config {{ bos_token }}", bos_token={"content": "<s>"})
    assert Tokenizer(folder).render([]) == "config <s>"
    (folder / "chat_template.jinja").write_text("beside")
    assert Tokenizer(folder).render([]) == "beside"
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")
    assert Tokenizer(folder, mine).render([]) == "mine"


def test_model_without_a_template(folder):
    tokenizer = Tokenizer(folder)
    assert tokenizer.template is None
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        tokenizer.chat_ids([USER])
    assert (caught.value.param, caught.value.code) == ("messages", "no_chat_template")


def test_template_writes_its_own_special_tokens(folder):
    config(folder, chat_template="<|start|>{{ messages[0].content }}<|end|>")
    tokenizer = Tokenizer(folder)
    ids = tokenizer.chat_ids([{"role": "user", "content": "the"}])
    assert [tokenizer.token(i) for i in (ids[0], ids[-1])] == ["<|start|>", "<|end|>"]


def test_broken_templates(folder, tmp_path):
    config(folder, chat_template="{% for %}")
    with pytest.raises(TokenizerError, match="does not compile"):
        Tokenizer(folder)
    with pytest.raises(TokenizerError, match="cannot be read") as caught:
        Tokenizer(folder, tmp_path / "nowhere.jinja")
    assert "--chat-template" in caught.value.fix
    latin = tmp_path / "latin.jinja"
    latin.write_bytes(b"\xe9\xff")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(folder, latin)


def test_missing_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json") as caught:
        Tokenizer(tmp_path)
    assert "--skip-tokenizer-init" in caught.value.fix


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_sentencepiece_alone(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(TokenizerError, match="only a sentencepiece tokenizer") as caught:
        Tokenizer(tmp_path)
    assert name in caught.value.cause
    assert "save_pretrained" in caught.value.fix


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "New"}}', "null"])
def test_broken_tokenizers(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


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
