"""Tool calls and reasoning are told apart in every format, however the text is cut."""

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.frontend.text.output_parser import (
    REASONING_MARKERS,
    OutputParser,
    OutputParserSpec,
    choose_reasoning_markers,
)
from headway.frontend.text.parts import CallBegins, CallEnds, ContentPart, ParsedOutput, Part
from headway.frontend.text.tools import BY_NAME, FORMATS, choose_format

OFFERED = frozenset({"f", "g", "get_weather"})
THINK = REASONING_MARKERS[0]
Result = tuple[str, str, list[tuple[str, str, bool]]]


def parts_of(spec: OutputParserSpec, pieces: Iterable[str]) -> list[Part]:
    """All parts, from a text that arrives in pieces and then ends."""
    parser = OutputParser(spec)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return [*parts, *parser.push("", last=True)]


def told(spec: OutputParserSpec, *pieces: str) -> Result:
    """ContentPart, reasoning, and each call's name, arguments and completeness."""
    output = ParsedOutput()
    output.accumulate(parts_of(spec, pieces))
    calls = [(call.name, call.arguments, call.complete) for call in output.calls]
    return output.content, output.reasoning, calls


def spec(name: str, **fields: object) -> OutputParserSpec:
    return OutputParserSpec(format=BY_NAME[name], offered=OFFERED, **fields)  # type: ignore[arg-type]


# ── what each format means ──────────────────────────────────────────────────────────────────

ROME = '{"city": "Rome"}'
HERMES = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
XML = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"
CITY = "<parameter=city>\nRome\n</parameter>\n"
WELL_FORMED = [
    ("qwen3_coder", XML % CITY, "", [("f", ROME)]),
    ("qwen3_coder", f"Let me see.\n{XML % CITY}", "Let me see.", [("f", ROME)]),
    ("qwen3_coder", f"{XML % CITY}\n{XML % ''}\n", "", [("f", ROME), ("f", "{}")]),
    ("qwen3_coder", f"a {XML % ''} b", "a b", [("f", "{}")]),
    ("qwen3_coder", f"<function=f>{CITY}</function>", "", [("f", ROME)]),
    ("qwen3_coder", XML % "<parameter=s>\n\"a\"\n\nb\n\n</parameter>", "",
     [("f", '{"s": "\\"a\\"\\n\\nb\\n"}')]),
    ("qwen3_coder", XML % "<parameter=a>1</parameter><parameter=b>[</parameter>", "",
     [("f", '{"a": "1", "b": "["}')]),
    ("hermes", HERMES % ROME, "", [("f", ROME)]),
    ("hermes", f"Let me see.\n{HERMES % ROME}", "Let me see.", [("f", ROME)]),
    ("hermes", f"{HERMES % ROME}\n{HERMES % '{}'}\n", "", [("f", ROME), ("f", "{}")]),
    ("hermes", f"a {HERMES % '{}'} b", "a b", [("f", "{}")]),
    ("hermes", HERMES % '{"s": "</tool_call>\\""}', "", [("f", '{"s": "</tool_call>\\""}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>', "",
     [("g", '{"a": 1}')]),
    ("hermes", HERMES % '"{\\"a\\": 1}"', "", [("f", '{"a": 1}')]),
    ("hermes", HERMES % "null", "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"id": [1], "name": "unheard_of", "parameters": {}, "x": 1}</tool_call>',
     "", [("unheard_of", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json",
     '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
     "", [("f", "{}"), ("g", "{}")]),
    ("llama3_json", 'Well: <|python_tag|>{"name": "f", "parameters": {}}', "Well:", [("f", "{}")]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{ROME}", "", [("f", ROME)]),
    ("mistral", "Hm[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]g{}", "Hm",
     [("f", "{}"), ("g", "{}")]),
    ("mistral_list",
     '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
     "", [("f", "{}"), ("g", "{}")]),
    ("granite", f'<|tool_call|>[{{"name": "f", "arguments": {ROME}}}]<|/tool_call|>', "",
     [("f", ROME)]),
    ("gemma4", '<|tool_call>call:f{city:<|"|>Rome "A"<|"|>,days:[1,2.5,{x:true}]}<tool_call|>', "",
     [("f", '{"city": "Rome \\"A\\"", "days": [1, 2.5, {"x": true}]}')]),
    ("functiongemma", "<start_function_call>call:f{city:<escape>Rome, {Italy}<escape>, n:-3}"
     "<end_function_call><start_function_call>call:g{}<end_function_call>", "",
     [("f", '{"city": "Rome, {Italy}", "n": -3}'), ("g", "{}")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), WELL_FORMED)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert told(spec(name), text) == (content, "", [(*call, True) for call in calls])
    assert told(spec(name, reasoning=THINK), text)[2] == [(*call, True) for call in calls]


PLAIN = ["", " ", "Hello there.\n", "a < b and [c] {d}", '{"a": 1}', "<tool_", "```json\n{}\n```"]


@pytest.mark.parametrize("name", BY_NAME)
def test_text_without_calls_is_all_content(name: str) -> None:
    for text in PLAIN:
        assert told(spec(name), text) == (text, "", [])


NO_CALLS = [
    ("qwen3_coder", "<tool_call> I would call f </tool_call>"),
    ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
    ("qwen3_coder", "the element <function= f> is"),
    ("hermes", "<tool_call> I would call f </tool_call>"),
    ("hermes", '<tool_call>{"city": "Rome"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", '),
    ("llama3_json", '{"name": "somebody", "parameters": {}}'),
    ("llama3_json", '{"name": "f", "age": 3}'),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral_list", "[TOOL_CALLS][]"),
    ("granite", "<|tool_call|>f()"),
    ("gemma4", "<|tool_call>f{}<tool_call|>"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_is_shown_as_it_stands(name: str, text: str) -> None:
    assert told(spec(name), text) == (text, "", [])


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> x', " x", '{"a": 1}',
     True),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call>', "", '{"a": [1',
     False),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b', "", '{"a": "b', False),
    ("hermes", '<tool_call>{"name": "f", "arguments": <none></tool_call>', "", "", False),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": tru', "", '{"a": tru', False),
    ("gemma4", '<|tool_call>call:f{a:<|"|>b', "", '{"a": "b', False),
    ("gemma4", "<|tool_call>call:f{a:1 b:2}<tool_call|>", "", '{"a": 1', False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "arguments", "complete"), BROKEN)
def test_a_call_that_breaks_off_is_a_call(
    name: str, text: str, content: str, arguments: str, complete: bool
) -> None:
    assert told(spec(name), text) == (content, "", [("f", arguments, complete)])


def test_a_single_call_ends_the_answer() -> None:
    one = spec("hermes", single=True)
    parser = OutputParser(one)
    parts = parser.push(f"Well. {HERMES % ROME}\n{HERMES % '{}'} and more")
    assert parser.done and parser.num_calls >= 1
    output = ParsedOutput()
    output.accumulate(parts)
    assert (output.content, [c.arguments for c in output.calls]) == ("Well.", [ROME])
    assert parser.push("x", last=True) == []


# ── the order of parts ──────────────────────────────────────────────────────────────────────


def test_arguments_come_as_they_are_written() -> None:
    """A call begins with its name; no piece waits for the end of a long string."""
    parser = OutputParser(spec("hermes"))
    assert parser.push("<tool_call>\n{") == []
    begins, *rest = parser.push('"name": "f", "arguments": {"text": "Once upon')
    assert isinstance(begins, CallBegins) and (begins.index, begins.name) == (0, "f")
    assert begins.call_id.startswith("call_") and len(begins.call_id) == 29
    assert [part.text for part in rest] == ['{"text": "Once upon']  # type: ignore[union-attr]
    assert [part.text for part in parser.push(" a time")] == [" a time"]  # type: ignore[union-attr]
    *_, ends = parser.push('"}}')
    assert ends == CallEnds(0)


def test_content_waits_only_for_what_may_become_a_call() -> None:
    parser = OutputParser(spec("hermes"))
    assert parser.push("Hello") == [ContentPart("Hello")]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [ContentPart(" <toolbox>")]
    assert parser.push(" ", last=True) == [ContentPart(" ")]


def test_ids_are_as_the_template_wants_them() -> None:
    for name, length in (("mistral", 9), ("mistral_list", 9), ("hermes", 29)):
        ids = {BY_NAME[name].new_id() for _ in range(50)}
        assert len(ids) == 50 and {len(call_id) for call_id in ids} == {length}


# ── reasoning ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nhm\n</think>\n\nFive.", False, ("Five.", "hm")),
        ("\n<think>hm</think>Five.", False, ("Five.", "hm")),
        ("hm, 2 < 3\n</think>\n\nFive.", True, ("Five.", "hm, 2 < 3")),
        ("<think>\n\n</think>\n\nFive.", False, ("Five.", "")),
        ("<think>\nwithout end", False, ("", "without end")),
        ("Five <think>no</think>", False, ("Five <think>no</think>", "")),
        ("Five.", False, ("Five.", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_is_told_from_content(
    text: str, thinking: bool, expected: tuple[str, str]
) -> None:
    for name in (None, "hermes", "llama3_json", "mistral"):
        asked = OutputParserSpec(
            format=BY_NAME[name] if name else None, reasoning=THINK, thinking=thinking
        )
        assert told(asked, text)[:2] == expected
        assert told(asked, *text)[:2] == expected


def test_no_call_is_made_of_a_thought() -> None:
    text = f"<think>{HERMES % '{}'}</think>{HERMES % ROME}"
    content, thought, calls = told(spec("hermes", reasoning=THINK), text)
    assert (content, thought) == ("", HERMES % "{}") and calls == [("f", ROME, True)]


# ── any split ───────────────────────────────────────────────────────────────────────────────

MARKS = sorted({mark for row in FORMATS for mark in row.markers})
CRUMBS = st.sampled_from(
    [
        *MARKS, *(mark[:-1] for mark in MARKS), "<think>", "</think>", "\n", " ", "{", "}", "[",
        "]",
        '"', "\\", ",", ":", ";", "call:", "name", "f", "g", '"name": "f"', '"arguments": ',
        '"parameters": {"a": 1}', "é", "🌊", "1", "-2.5e3", "true", "null", "x" * 20, "\\u00e9",
    ]
)  # fmt: skip
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=5), ANY_JSON, max_size=3).map(json.dumps)
WHOLE = st.sampled_from([case[1] for case in WELL_FORMED] + [case[1] for case in BROKEN])
TEXTS = st.lists(CRUMBS | WHOLE | ARGUMENTS.map(lambda a: HERMES % a), max_size=12).map("".join)


def cut(text: str, places: Iterable[int]) -> list[str]:
    ends = sorted({0, len(text), *(at for at in places if at < len(text))})
    return [text[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize("name", BY_NAME)
@given(text=TEXTS, places=st.sets(st.integers(0, 400)), thinking=st.booleans(), one=st.booleans())
def test_any_split_gives_the_same_as_the_whole(
    name: str, text: str, places: set[int], thinking: bool, one: bool
) -> None:
    asked = spec(name, reasoning=THINK, thinking=thinking, single=one)
    whole = told(asked, text)
    assert told(asked, *cut(text, places)) == whole
    assert told(asked, *text) == whole


@pytest.mark.parametrize("name", BY_NAME)
@given(text=TEXTS, places=st.sets(st.integers(0, 400)))
def test_parts_are_in_order_and_nothing_is_lost(name: str, text: str, places: set[int]) -> None:
    """Calls are numbered, begun and ended one after another; content stands in the text."""
    parts = parts_of(spec(name), cut(text, places))
    begun = [part.index for part in parts if isinstance(part, CallBegins)]
    ended = [part.index for part in parts if isinstance(part, CallEnds)]
    assert begun == ended == list(range(len(begun)))
    running: int | None = None
    for part in parts:
        match part:
            case CallBegins(index):
                assert running is None
                running = index
            case CallEnds(index):
                assert running == index
                running = None
            case ContentPart(piece):
                assert running is None and piece
            case _:
                assert part.index == running  # type: ignore[union-attr]
    shown = "".join(part.text for part in parts if isinstance(part, ContentPart))
    rest = iter(text)
    assert all(character in rest for character in shown), "content that the text does not hold"
    if not begun:
        assert shown == text


@given(arguments=ARGUMENTS, places=st.sets(st.integers(0, 400)))
def test_arguments_are_kept_to_the_letter(arguments: str, places: set[int]) -> None:
    for text, name in (
        (HERMES % arguments, "hermes"),
        (f'{{"name": "f", "parameters": {arguments}}}', "llama3_json"),
        (f"[TOOL_CALLS]f[ARGS]{arguments}", "mistral"),
        (f'[TOOL_CALLS][{{"name": "f", "arguments": {arguments}}}]', "mistral_list"),
    ):
        assert told(spec(name), *cut(text, places)) == ("", "", [("f", arguments, True)])


def test_a_hundred_thousand_marks_cost_no_more_than_text() -> None:
    """Each character is looked at a bounded number of times: 1 MB of false starts is quick work."""
    text = "<tool_call>{" * 40_000 + '"' + '\\"' * 100_000
    assert told(spec("hermes"), text) == (text, "", [])
    assert told(spec("qwen3_coder"), text) == (text, "", [])
    assert told(spec("llama3_json"), "{" * 500_000)[0] == "{" * 500_000


TYPED = [
    ("5", {"type": "string"}, '"5"'),
    ("5", {"type": "integer"}, "5"),
    ("5.5", {"type": "number"}, "5.5"),
    ("5", None, '"5"'),
    ("5", {}, "5"),
    ("Rome", {}, '"Rome"'),
    ("true", {"type": "boolean"}, "true"),
    ("False", {"type": "boolean"}, "false"),
    ("null", {"type": ["string", "null"]}, "null"),
    ("5", {"type": ["string", "null"]}, '"5"'),
    ('{"a": [1]}', {"type": "object"}, '{"a": [1]}'),
    ('{"a": [1]}', {"type": "string"}, '"{\\"a\\": [1]}"'),
    ("[1,", {"type": "array"}, '"[1,"'),
    ("NaN", {"type": "number"}, '"NaN"'),
    ("[" * 9999, {"type": "array"}, '"' + "[" * 9999 + '"'),
]


@pytest.mark.parametrize(("text", "schema", "value"), TYPED)
def test_elements_mean_what_their_schema_says(text: str, schema: object, value: str) -> None:
    schemas = {"f": {"properties": {"a": schema} if schema is not None else {}}}
    call = XML % f"<parameter=a>\n{text}\n</parameter>\n"
    found = told(spec("qwen3_coder", schemas=schemas), *call)
    assert found == ("", "", [("f", f'{{"a": {value}}}', True)])


def test_elements_that_break_off_are_a_call_that_did() -> None:
    for text in ("<tool_call><function=f>", XML.partition("%s")[0] + CITY, XML % "<parameter=a>x"):
        (call,) = told(spec("qwen3_coder"), text)[2]
        assert call[0] == "f" and not call[2]


# ── the table ───────────────────────────────────────────────────────────────────────────────

TEMPLATES = {
    "hermes": '{% if tools %}… <tool_call>\\n{\\"name\\": …, \\"arguments\\": …}{% endif %}',
    "qwen3_coder": "{% if tools %}<tool_call><function={{ f }}><parameter={{ k }}>{% endif %}",
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ name }}[ARGS]{{ args }}",
    "mistral_list": "{% if tools is not none %}{% endif %}[TOOL_CALLS] [{{ calls }}]",
    "gemma4": "{% for tool in tools %}{% endfor %}<|tool_call>call:{{ name }}",
    "functiongemma": "{% for tool in tools %}{% endfor %}<start_function_call>call:{{ name }}",
    "granite": "{% if tools %}{% endif %} respond with <|tool_call|> followed by a JSON list",
    "llama3_json": "{% if tools is defined %}{{ '\"parameters\": ' }}{% endif %}<|python_tag|>",
}


def test_the_format_is_told_by_the_template() -> None:
    assert TEMPLATES.keys() == BY_NAME.keys() - {"generic"}  # that is for templates without tools
    for name, template in TEMPLATES.items():
        chosen = choose_format(template)
        assert chosen is not None and chosen.name == name
    for template in (None, "", "{{ messages }}", '<tool_call> "name" xml_tools', "{% if tools %}"):
        assert choose_format(template) is None


def test_our_own_template_writes_hermes_calls() -> None:
    from recipes.tiny.chatml import TEMPLATE

    chosen = choose_format(TEMPLATE)
    assert chosen is not None and chosen.name == "hermes"


def test_reasoning_is_told_by_the_template() -> None:
    assert choose_reasoning_markers("{{ '<think>\\n\\n</think>' }}") == THINK
    assert choose_reasoning_markers("[THINK]…[/THINK]") == REASONING_MARKERS[1]
    assert choose_reasoning_markers("plain") is choose_reasoning_markers(None) is None
