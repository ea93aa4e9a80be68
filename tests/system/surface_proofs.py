"""What a field of the surface does, as checks: each asks, and asserts on what it got."""

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from surface_clients import CHAT, EOS, LENGTH, MESSAGES, RESPONSES, USER, Ask, Got

HOT = {"temperature": 1.5, "seed": 5}
END_NOW = {"logit_bias": {str(EOS): 100}}


def follows(pattern: str, **fields: Any) -> Callable[[Ask], None]:
    """The answer's text is held to a grammar."""

    def proof(ask: Ask) -> None:
        got = ask(**fields)
        assert got.texts and all(re.fullmatch(pattern, text) for text in got.texts), got.texts

    return proof


class Same:
    """With these fields the answer is what it is without."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __call__(self, ask: Ask) -> None:
        assert ask(**self.fields).texts == ask().texts


def changes(**fields: Any) -> Callable[[Ask], None]:
    """With these fields the answer is another."""

    def proof(ask: Ask) -> None:
        assert ask(**fields).texts != ask().texts

    return proof


def lengthens(**fields: Any) -> Callable[[Ask], None]:
    """With these fields the prompt is longer."""

    def proof(ask: Ask) -> None:
        assert ask(**fields).num_prompt > ask().num_prompt

    return proof


def tells(name: str, value: Any) -> Callable[[Ask], None]:
    """The field comes back in the answer, which is the same."""

    def proof(ask: Ask) -> None:
        got = ask(**{name: value})
        told = getattr(got.raw, name)
        assert (
            told.model_dump(exclude_none=True) if hasattr(told, "model_dump") else told
        ) == value
        assert got.texts == ask().texts

    return proof


def model(ask: Ask) -> None:
    got = ask(model="nickname")
    assert got.texts == ask().texts
    assert got.raw.model == "nickname" if hasattr(got.raw, "model") else True


def several(ask: Ask) -> None:
    got = ask(n=3)
    assert got.texts == ask().texts * 3 and got.num_answer == 3 * LENGTH


def seed(ask: Ask) -> None:
    first, again = ask(**HOT), ask(**HOT)
    assert first.texts == again.texts != ask(temperature=1.5, seed=6).texts


def stop(name: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        (text,) = ask().texts
        mark = text[4:8]
        got = ask(**{name: [mark]})
        assert got.texts == [text[: text.index(mark)]] and got.finish == ["stop"]

    return proof


def keeps_stop(name: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        (text,) = ask().texts
        mark = text[4:8]
        got = ask(**{name: [mark], "include_stop_str_in_output": True})
        assert got.texts == [text[: text.index(mark) + len(mark)]]

    return proof


def length(name: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        others = dict.fromkeys({"max_tokens", "max_output_tokens"} - {name}, ...)
        got = ask(**{**others, name: 5})
        assert got.num_answer == 5 and got.finish == ["length"]
        assert ask().texts[0].startswith(got.texts[0])

    return proof


def end_token(ask: Ask) -> None:
    got = ask(**END_NOW)
    assert (got.texts, got.finish, got.num_answer) == ([""], ["stop"], 1)


def ignores_end(ask: Ask) -> None:
    assert ask(**END_NOW, ignore_eos=True).num_answer == LENGTH


def at_least(ask: Ask) -> None:
    assert ask(**END_NOW, min_tokens=5).num_answer == 6


def stop_ids(ask: Ask) -> None:
    got = ask(allowed_token_ids=[40, 41], stop_token_ids=[40, 41])
    assert got.num_answer == 1 and got.finish == ["stop"]


def allowed(ask: Ask) -> None:
    (text,) = ask(allowed_token_ids=[40]).texts
    assert text == text[0] * LENGTH


def specials(ask: Ask) -> None:
    only = {"allowed_token_ids": [1]}
    assert ask(**only).texts == [""]
    assert ask(**only, skip_special_tokens=False).texts == ["<|im_start|>" * LENGTH]


def timings(ask: Ask) -> None:
    assert ask().extra("timings") is None
    assert ask(timings=True).extra("timings")["e2e_s"] > 0


def token_ids(ask: Ask) -> None:
    got = ask(return_token_ids=True)
    chunks = got.chunks or [got.raw]
    found = [t for c in chunks for x in c.choices for t in x.model_extra.get("token_ids") or []]
    assert len(found) == LENGTH
    assert len(prompt_ids(got)) == got.num_prompt


def prompt_ids(got: Got) -> list[int]:
    """The prompt's token ids: beside the choices in chat, in each in completions, told once."""
    chunks = got.chunks or [got.raw]
    told = [c.model_extra.get("prompt_token_ids") for c in chunks]
    told += [x.model_extra.get("prompt_token_ids") for c in chunks for x in c.choices]
    (ids,) = [ids for ids in told if ids is not None]
    return list(ids)


def tokens_as_ids(ask: Ask) -> None:
    asked = {"top_logprobs": 1, "logprobs": True} if ask().is_chat else {"logprobs": 1}
    got = ask(**asked, return_tokens_as_token_ids=True, return_token_ids=True)
    shown, ids = [], []
    for chunk in got.chunks or [got.raw]:
        for choice in chunk.choices:
            ids += choice.model_extra.get("token_ids") or []
            if choice.logprobs is not None:
                content = getattr(choice.logprobs, "content", None)
                shown += [e.token for e in content] if content else choice.logprobs.tokens or []
    assert shown == [f"token_id:{token_id}" for token_id in ids] and len(ids) == LENGTH


def truncates(ask: Ask) -> None:
    whole = prompt_ids(ask(return_token_ids=True))
    got = ask(truncate_prompt_tokens=3, return_token_ids=True)
    assert prompt_ids(got) == whole[-3:] and got.num_prompt == 3
    assert ask(truncate_prompt_tokens=-1).texts == ask().texts


def truncates_right(ask: Ask) -> None:
    whole = prompt_ids(ask(return_token_ids=True))
    got = ask(truncate_prompt_tokens=3, truncation_side="right", return_token_ids=True)
    assert prompt_ids(got) == whole[:3]


def echoes_chat(ask: Ask) -> None:
    begun = {"messages": [*USER, {"role": "assistant", "content": "It is"}]}
    goes_on = {**begun, "continue_final_message": True, "add_generation_prompt": False}
    assert ask(**goes_on, echo=True).texts == ["It is" + ask(**goes_on).texts[0]]
    assert ask(echo=True).texts == ask().texts


def no_reasoning(ask: Ask) -> None:
    """The model here has none; test_tools.py shows one that has."""
    Same(include_reasoning=False)(ask)


def prompt_scores(ask: Ask) -> None:
    got = ask(prompt_logprobs=1)
    scores = got.extra("prompt_logprobs") or got.raw.choices[0].model_extra["prompt_logprobs"]
    assert len(scores) == got.num_prompt and scores[0] is None


def usage_last(ask: Ask) -> None:
    if ask().chunks:
        plain = ask(stream_options={"include_usage": False})
        assert plain.num_prompt == 0 and all(chunk.choices for chunk in plain.chunks)
        usage = {"include_usage": True, "continuous_usage_stats": True}
        each = ask(stream_options=usage, return_token_ids=True)
        # 0, 1, 2 … 8, or 0, 8 where tokens wait and go together: those that were shown so far
        counts = [chunk.usage.completion_tokens for chunk in each.chunks]
        ids = [
            [getattr(c, "token_ids", None) or [] for c in chunk.choices] for chunk in each.chunks
        ]
        shown = [sum(map(len, several)) for several in ids]
        assert counts == list(accumulate(shown))
        assert counts[-1] == each.num_answer == LENGTH and not each.chunks[-1].choices
    assert ask().num_answer == LENGTH


def obfuscation(ask: Ask) -> None:
    if ask().chunks:
        assert ask(stream_options={"include_obfuscation": False}).texts == ask().texts


def parts(name: str, kind: str) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        content = [{"type": kind, "text": USER[0]["content"]}]
        assert ask(**{name: [{"role": "user", "content": content}]}).texts == ask().texts
        longer = [*USER, {"role": "assistant", "content": "It is"}, *USER]
        assert ask(**{name: longer}).num_prompt > ask().num_prompt

    return proof


def continued(ask: Ask) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    got = ask(messages=begun, continue_final_message=True, add_generation_prompt=False)
    assert ask().num_prompt < got.num_prompt < ask(messages=begun).num_prompt


def no_prompt(ask: Ask) -> None:
    assert ask(add_generation_prompt=False).num_prompt < ask().num_prompt


def logprobs(**fields: Any) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        got = ask(**fields)
        assert len(got.logprobs) == LENGTH and got.texts == ask().texts
        assert ask().logprobs == []

    return proof


def alternatives(**fields: Any) -> Callable[[Ask], None]:
    def proof(ask: Ask) -> None:
        assert all(len(entry.top_logprobs) == 3 for entry in ask(**fields).logprobs)

    return proof


def echoes(ask: Ask) -> None:
    assert ask(echo=True).texts == ["Once upon" + ask().texts[0]]


def prompts(ask: Ask) -> None:
    assert ask(prompt=["Once upon"]).texts == ask().texts
    assert ask(prompt=["Once upon", "The sea"]).texts[0] == ask().texts[0]
    assert ask(prompt=[40, 41, 42]).num_prompt == 3
    assert ask(prompt=[[40, 41], [42]]).num_prompt == 3


def stored(ask: Ask) -> None:
    assert ask(store=True).raw.model_extra["store"] is True
    assert ask(store=False).raw.model_extra["store"] is False


def goes_on(ask: Ask) -> None:
    first = ask(instructions="Be brief.")
    got = ask(previous_response_id=first.raw.id)
    assert got.raw.previous_response_id == first.raw.id
    assert got.num_prompt > ask().num_prompt


def system(ask: Ask) -> None:
    as_text = ask(system="Be brief.")
    assert as_text.num_prompt > ask().num_prompt
    assert ask(system=[{"type": "text", "text": "Be brief."}]).texts == as_text.texts


CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED = {"name": "get_weather", "description": "Tell the weather"}
TOOLS: dict[str, Any] = {
    CHAT: [{"type": "function", "function": {**NAMED, "parameters": CITY}}],
    RESPONSES: [{"type": "function", **NAMED, "parameters": CITY, "strict": False}],
    MESSAGES: [{**NAMED, "input_schema": CITY}],
}


YES = {"enum": ["yes", "no"]}


AB = "(ab|cd)!"
GBNF = 'root ::= ("ab" | "cd") end\nend ::= "!"'
CONSTRAINTS: list[tuple[str, str, Callable[[Ask], None]]] = [
    ("guided_json", "vLLM's old name: a schema is kept", follows('"(yes|no)"', guided_json=YES)),
    ("guided_regex", "vLLM's old name: it matches", follows(AB, guided_regex=AB)),
    ("guided_choice", "vLLM's old name: one of them", follows("ab|cd", guided_choice=["ab", "cd"])),
    ("guided_grammar", "vLLM's old name: GBNF or Lark", follows(AB, guided_grammar=GBNF)),
    ("grammar", "llama.cpp's name: GBNF or Lark", follows(AB, grammar=GBNF)),
    ("json_schema", "llama.cpp's, SGLang's name", follows('"(yes|no)"', json_schema=YES)),
    ("regex", "SGLang's name: it matches", follows(AB, regex=AB)),
    ("ebnf", "SGLang's name: GBNF or Lark", follows(AB, ebnf=GBNF)),
    ("format", "Ollama's name: json or a schema", follows('"(yes|no)"', format=YES)),
]
"""Names other servers have for what the text must be."""


def text_format(ask: Ask) -> None:
    Same(text={"format": {"type": "text"}, "verbosity": "low"})(ask)
    wanted = {"type": "json_schema", "name": "answer", "schema": YES}
    follows('"(yes|no)"', text={"format": wanted})(ask)


def output(ask: Ask) -> None:
    lengthens(output_config={"effort": "low"})(ask)
    follows('"(yes|no)"', output_config={"format": {"type": "json_schema", "schema": YES}})(ask)


def offered(endpoint: str) -> Callable[[Ask], None]:
    return lengthens(tools=TOOLS[endpoint])


def no_choice(endpoint: str, none: Any) -> Callable[[Ask], None]:
    return Same(tools=TOOLS[endpoint], tool_choice=none)


def one_call(endpoint: str) -> Callable[[Ask], None]:
    return lengthens(tools=TOOLS[endpoint], parallel_tool_calls=False)
