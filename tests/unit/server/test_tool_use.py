"""What a request says of tools, its grammar, and any nonsense instead."""

import json
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RequestError
from headway.edge import body as bodies
from headway.frontend.text.tools import BY_NAME, FORMATS
from headway.frontend.text.tools.written import (
    OfferedTool,
    calls_grammar,
    json_value,
    regex_value,
    thought_then,
)
from headway.server.openai.calls import shorten_id
from headway.server.openai.schema import ChatBody, chat_messages
from headway.server.openai.tools import ToolUse, tool_use

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def read(**fields: object) -> ToolUse | None:
    """The three fields as a body brings them."""
    body = bodies.typed({"model": "m", "messages": [], **fields}, ChatBody)
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)


ATOMS = st.sampled_from(
    [
        None,
        True,
        0,
        -1,
        2**70,
        "",
        "auto",
        "none",
        "required",
        "function",
        "allowed_tools",
        "f",
        "g",
    ]
)
KEYS = st.sampled_from(
    "type function name parameters strict description mode tools allowed_tools id role content "
    "tool_calls arguments tool_call_id properties".split()
)
ANYTHING = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
FUNCTION = {"type": "function", "function": {"name": "f"}}


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the RequestError it raises."""
    try:
        return call()
    except RequestError as error:
        return error


@given(tools=st.just([FUNCTION]) | st.lists(ANYTHING) | ANYTHING, choice=ANYTHING, several=ANYTHING)
def test_anything_is_read_or_refused(tools: object, choice: object, several: object) -> None:
    fields = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": several}
    use = outcome(lambda: read(**fields))
    if isinstance(use, RequestError):
        assert use.status == 400 and use.code
        assert re.match("tools|tool_choice|parallel_tool_calls", use.param or "")
    else:
        assert use is None or (isinstance(use, ToolUse) and use.offered)


@given(st.lists(st.dictionaries(KEYS, ANYTHING, max_size=5), min_size=1))
def test_any_messages_are_read_or_refused(messages: list[dict[str, object]]) -> None:
    roles = ("user", "assistant", "tool")
    asked = [{"role": roles[i % 3], "content": "x", **m} for i, m in enumerate(messages)]
    rendered = outcome(lambda: chat_messages(asked))
    if isinstance(rendered, RequestError):
        assert rendered.status == 400 and rendered.code
        assert (rendered.param or "").startswith("messages")
    else:
        json.dumps(rendered)


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ('{"city": "Rome"}', True),
        ('{"city": "Rome", "days": 2}', True),
        ('{"city": 5}', False),
        ("{}", False),
        ("[]", False),
        ("", False),
        ('{"city": "Rome"', False),
        ("{" * 100_000, False),
    ],
)
def test_arguments_are_judged(arguments: str, fits: bool) -> None:
    use = read(tools=[{"type": "function", "function": {"name": "f", "parameters": WEATHER}}])
    assert use is not None
    assert (use.fault("f", arguments) is None) == fits
    assert use.fault("g", "{}") is not None


def test_short_ids_are_short_and_the_same_again() -> None:
    assert shorten_id("abcDEF123") == "abcDEF123"
    for long in ("call_1", "", "abcDEF12é", "x" * 500):
        assert re.fullmatch("[A-Za-z0-9]{9}", shorten_id(long)) and shorten_id(long) == shorten_id(
            long
        )
    assert shorten_id("call_1") != shorten_id("call_2")


# ── grammars ────────────────────────────────────────────────────────────────────────────────

XML = "<tool_call>\n<function=w>\n%s</function>\n</tool_call>"
CALLS = {
    "qwen3_coder": XML,
    "hermes": '<tool_call>\n{"name": "w", "arguments": %s}\n</tool_call>',
    "generic": '<tool_call>\n{"name": "w", "arguments": %s}\n</tool_call>',
    "mistral": "[TOOL_CALLS]w[ARGS]%s",
    "mistral_list": '[TOOL_CALLS][{"name": "w", "arguments": %s}]',
    "granite": '<|tool_call|>[{"name": "w", "arguments": %s}]',
    "llama3_json": '{"name": "w", "parameters": %s}',
    "gemma4": "<|tool_call>call:w%s<tool_call|>",
    "functiongemma": "<start_function_call>call:w%s<end_function_call>",
}
ROME, WRONG = '{"city": "Rome", "days": 3}', '{"town": "Rome"}'
QUOTES = {"gemma4": '<|"|>', "functiongemma": "<escape>"}


def written(name: str, arguments: str) -> str:
    """A call of w, its arguments as the format writes them."""
    if name == "qwen3_coder":
        pairs = json.loads(arguments).items()
        arguments = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
    quote = QUOTES.get(name)
    if quote is not None:
        arguments = re.sub(r'"(\w+)": ', r"\1:", arguments).replace('"', quote).replace(", ", ",")
    return CALLS[name] % arguments


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` is all of an answer that the grammar allows."""
    llguidance = pytest.importorskip("llguidance")
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    if matcher.validate_tokens(tokens) < len(tokens):
        return False
    matcher.consume_tokens(tokens)
    return bool(matcher.is_accepting())


@pytest.mark.parametrize("name", BY_NAME)
def test_grammars_hold_answers_to_the_format(name: str) -> None:
    row = BY_NAME[name].written
    tools = [OfferedTool(name="w", schema=WEATHER, strict=True), OfferedTool(name="other")]
    good, wrong = written(name, ROME), written(name, WRONG)
    for forced in (True, False):
        for several in (True, False):
            rules = calls_grammar(row, tools, forced=forced, several=several)
            assert accepts(rules, good) and not accepts(rules, wrong)
            assert accepts(rules, "Fine, thank you.") == (not forced)
            text_first = accepts(rules, "Well. " + good)
            assert text_first == (not forced)
            if row.marked and not forced:
                assert not accepts(rules, "Well. " + wrong)
            if row.marked and not row.opens:
                assert accepts(rules, good + row.between + good) == (several or not forced)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_forced_call_may_be_thought_over(name: str) -> None:
    tools = [OfferedTool(name="w", schema=WEATHER, strict=True)]
    good, marks = written(name, ROME), ("<think>", "</think>")
    row = BY_NAME[name].written
    free = calls_grammar(row, tools, forced=True, several=True, thinks=marks)
    inside = calls_grammar(row, tools, forced=True, several=True, thinks=marks, thinking=True)
    assert accepts(free, good) and accepts(free, f"<think>\nhm\n</think>\n\n{good}")
    assert accepts(inside, f"hm\n</think>\n\n{good}") and not accepts(inside, "hm")
    assert not accepts(free, "hm") and not accepts(free, f"hm</think>{good}")


@pytest.mark.parametrize("row", [row for row in FORMATS if row.written.marked])
def test_text_with_calls_may_have_a_schema(row: object) -> None:
    tools = [OfferedTool(name="w", schema=WEATHER)]
    answer = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    rules = calls_grammar(row.written, tools, forced=False, several=True, answer=answer)  # type: ignore[attr-defined]
    assert accepts(rules, '{"a": 1}') and accepts(rules, written(row.name, ROME))  # type: ignore[attr-defined]
    assert not accepts(rules, "Fine.")


@pytest.mark.parametrize(
    ("schema", "good", "wrong"),
    [
        ({"const": "a"}, ["<|a<|"], ["<|b<|", "1"]),
        ({"enum": ["a", 1, True]}, ["<|a<|", "1", "true"], ["2", "<|1<|"]),
        ({"type": "integer", "minimum": 1, "maximum": 12}, ["1", "12"], ["0", "13", "1.5"]),
        ({"type": "integer"}, ["-7", "0"], ["07", "<|7<|"]),
        ({"type": ["string", "null"]}, ["<|x y<|", "null"], ["1"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[true,false]"], ["[1]"]),
        ({"type": "array", "items": {"const": 1}, "minItems": 1, "maxItems": 2}, ["[1]", "[1,1]"],
         ["[]", "[1,1,1]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
         ["{b:1}", "{a:<|x<|,b:[2]}"], ["{a:1}", "{}", "{b:1,c:2}"]),
        ({}, ["1", "<|x<|", "{k:[true,{}]}"], ["k"]),
    ],
)  # fmt: skip
def test_gemmas_arguments_keep_to_plain_schemas(
    schema: dict[str, object], good: list[str], wrong: list[str]
) -> None:
    tool = OfferedTool(name="w", schema={"properties": {"v": schema}, "required": ["v"]})
    rules = calls_grammar(BY_NAME["gemma4"].written, [tool], forced=True, several=False)
    for values, fits in ((good, True), (wrong, False)):
        for value in values:
            arguments = "{v:" + value.replace("<|", '<|"|>') + "}"
            text = CALLS["gemma4"] % arguments
            assert accepts(rules, text) == fits, value


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (json_value(WEATHER, strict=True), '{"city": "Rome"}', '{"town": "Rome"}'),
        ('"yes" | "no"', "no", "maybe"),
        (regex_value("a/b\\/[0-9]+\n?"), "a/b/12", "a/b/x"),
    ],
)
def test_a_constraint_follows_reasoning_that_the_prompt_opened(answer, good, bad):
    grammar = thought_then(answer, "</think>")
    for thought in ("Hm, {yes} or no?\n</think>", "</think>\n\n"):
        assert accepts(grammar, thought + good)
        assert not accepts(grammar, thought + bad)
    assert not accepts(grammar, good), "reasoning does not end by itself"
