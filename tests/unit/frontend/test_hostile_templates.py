"""Template bombs: fifteen templates that loop, grow or reach out; each costs its request alone."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import decoders

from headway.core.errors import RequestError, TokenizerError
from headway.frontend.text import Tokenizer
from headway.frontend.text.rendering import Renderer
from headway.frontend.text.template import ChatTemplate
from small_tokenizers import bytelevel

LIMIT_S = 1.0
MESSAGES = [{"role": "user", "content": "hi 🌊\u2028é"}]
HARMLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ bos_token }}"
LONG = "{% for i in range(99999) %}"
GROW = (
    "{% set n = namespace(s='ab') %}{% for i in range(80) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
HOSTILE = {
    "a loop in a loop": LONG + LONG + "{% endfor %}" * 2,
    "a loop that prints": "{% for i in range(99999) %}{{ messages * 9999 }}{% endfor %}",
    "a long string": "{{ 'a' * 2000000000 }}",
    "a long string with a variable": "{{ messages[0].role * 2000000000 }}",
    "a string that doubles": GROW + "{{ n.s }}",
    "a list that is long": "{{ ([0] * 2000000000) | length }}",
    "a big power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "a power of a variable": "{% set x = messages | length + 8 %}{{ x ** x ** x }}",
    "a wide format": "{{ '%999999999d' % 1 }}",
    "a padded string": "{{ 'a'.center(2000000000) }}",
    "a macro of itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "an endless join": "{{ range(99999) | map('string') | join('a' * 99999) }}",
    "a class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a global": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "a regular refusal": "{{ raise_exception('no') }}",
}


@pytest.fixture
def harmless() -> Iterator[Renderer]:
    renderer = Renderer(HARMLESS, {"bos_token": "<s>"}, limit_s=60)
    yield renderer
    renderer.close()


def test_a_template_renders_as_it_does_in_this_process(harmless: Renderer):
    here = ChatTemplate(HARMLESS, {"bos_token": "<s>"})
    large = [{"role": "user", "content": "é" * 300_000}]
    for messages in (MESSAGES, large, []):
        for options in ({}, {"add_generation_prompt": False, "number": 10**30}):
            assert harmless.render(messages, **options) == here.render(messages, **options)
    assert harmless.render(MESSAGES, continue_final_message=True) == here.render(
        MESSAGES, continue_final_message=True
    )
    for refused in ([], [{"role": "user"}]):
        with pytest.raises(RequestError) as caught:
            harmless.render(refused, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_what_cannot_be_sent_is_refused(harmless: Renderer):
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    for options in ({"x": 10**5000}, {"x": deep}):
        with pytest.raises(RequestError):
            harmless.render(MESSAGES, **options)
    assert harmless.render(MESSAGES).startswith("user: hi")


@pytest.mark.parametrize("name", HOSTILE)
def test_template_bombs_cost_their_request_alone(name: str):
    """Compiling is harmless, rendering ends in time, and the next request is served again."""
    bomb = "{% if messages[0].content == 'bomb' %}" + HOSTILE[name] + "{% endif %}ok"
    renderer = Renderer(bomb, {}, limit_s=LIMIT_S)
    try:
        assert renderer.render(MESSAGES) == "ok"
        with contextlib.suppress(RequestError):
            assert len(renderer.render([{"role": "user", "content": "bomb"}])) < 2 * 10**8
        assert renderer.render(MESSAGES) == "ok"
    finally:
        renderer.close()


BROKEN = {
    "no template": "{% for %}",
    "an unknown tag": "{% everything %}",
    "parentheses in parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "blocks in blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_does_not_compile_is_an_error_of_the_template(name: str):
    """Deep nesting is beyond Jinja's parser, or beyond Python's: both are told."""
    renderer = Renderer(BROKEN[name], {}, limit_s=60)
    for attempt in (renderer.compile, lambda: renderer.render(MESSAGES)):
        with pytest.raises(TokenizerError, match="chat template does not compile"):
            attempt()


@pytest.mark.parametrize("call", ["chat_ids", "render"])
def test_every_caller_renders_under_the_limits(tmp_path: Path, call: str):
    """`headway run --chat`, `LLM.chat` and evaluations render as the server does."""
    bytelevel(decoders.ByteLevel()).save(str(tmp_path / "tokenizer.json"))
    bomb = LONG + LONG + "{% endfor %}" * 2
    (tmp_path / "chat_template.jinja").write_text(bomb)
    with pytest.raises(RequestError, match="takes too much: more than 2 s"):
        getattr(Tokenizer(tmp_path), call)(MESSAGES)


def test_the_processes_of_a_renderer_end_with_it():
    renderer = Renderer(HARMLESS, {})
    renderer.render(MESSAGES)
    worker = renderer._idle.queue[-1]
    del renderer
    assert worker.process.returncode is not None


def test_a_switch_that_computes_is_refused_where_it_compiles():
    with pytest.raises(TokenizerError, match="autoescape takes a constant"):
        ChatTemplate("{% autoescape 'a' * 2000000000 %}{% endautoescape %}", {})
    assert ChatTemplate(
        "{% autoescape true %}{{ bos_token }}{% endautoescape %}", {"bos_token": "&"}
    )
