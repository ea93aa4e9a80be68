"""A model's chat template: messages in, the text of the prompt out.

Templates are Jinja, as transformers runs them: sandboxed, blocks trimmed, with `raise_exception`,
`strftime_now`, `tojson` and {% generation %}. Only the model's own template or the operator's file
is ever run; a request cannot bring one. A `ChatTemplate` has no limits of its own: it is compiled
and rendered in the process of `frontend.text.render_process`, which `rendering.Renderer` asks.
"""

import datetime
import json
from collections.abc import Callable, Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.core.errors import RequestError, TokenizerError
from headway.core.regular_file import read_text
from headway.spec.model_files import read_document

MARK = "HEADWAY_CONTINUES_HERE "
MOST_TEMPLATE_BYTES = 2**20
Messages = list[dict[str, Any]]
INSTRUCTIONS = ("system", "developer")
"""Roles of messages that instruct."""


class TemplateRefusedError(Exception):
    """A template called raise_exception."""


class Unfolded(CodeGenerator):
    """Compiles without computing: {{ "a" * 10**10 }} would be built here, where it compiles."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_EvalContextModifier(  # noqa: N802  (the name that Jinja calls)
        self, node: nodes.EvalContextModifier, frame: Frame
    ) -> None:
        if not all(isinstance(option.value, nodes.Const) for option in node.options):
            self.fail("autoescape takes a constant", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    code_generator_class = Unfolded


class Generation(Extension):
    """{% generation %} … {% endgeneration %}: what the assistant wrote, for masks in training.

    A prompt is the text alone. The block is a call, as transformers has it: what is set inside is
    not seen behind it.
    """

    tags = {"generation"}  # noqa: RUF012  (the name that Jinja reads)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, Generation],
            optimized=False,
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = strftime_now
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Python's own compiler has limits, too: of nested parentheses
            raise not_compiled(str(error) or type(error).__name__) from error
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source
        self._takes_both: dict[tuple[str, str], bool] = {}

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends inside the last message.

        A template that does not know the role developer gets system; see `_instructed`.
        """
        given = messages
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]
        messages = self._instructed(messages)
        if continue_final_message:
            messages = mark_last(messages)
        generate = add_generation_prompt and not continue_final_message
        options = {**options, "tools": tools, "add_generation_prompt": generate}
        try:
            text = self._rendered(messages, options)
        except Exception as error:  # a template is the model's code: it may raise anything
            self._refuse_arguments(given, messages, options)
            raise RequestError(
                f"The model's chat template refuses these messages: "
                f"{str(error)[:500] or type(error).__name__}",
                param="messages",
                code="invalid_value",
            ) from error
        return cut_at_mark(text) if continue_final_message else text

    def _rendered(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        return self._template.render({**self._special_tokens, **options, "messages": messages})

    def _refuse_arguments(
        self, given: Messages, messages: Messages, options: dict[str, Any]
    ) -> None:
        """RequestError for arguments of an earlier call that are no object, if it is their fault.

        A model may have written anything, and some templates write text as it is; others go
        through the pairs of an object.
        """
        where = next(text_arguments(given), None)
        if where is None:
            return
        try:
            self._rendered([with_objects(message) for message in messages], options)
        except Exception:  # something else is at fault, too
            return
        raise RequestError(
            f"{where} is not a JSON object, and the model's chat template needs one.",
            param=where,
            code="invalid_value",
        )

    def _instructed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with several leading instructions as one, where the template takes one."""
        leading = [*takewhile(lambda message: message.get("role") in INSTRUCTIONS, messages)]
        roles = [message["role"] for message in leading]
        if all(self._takes(pair) for pair in pairwise(roles)):
            return messages
        merged = {**leading[0], "content": merged_content([m.get("content") for m in leading])}
        return [merged, *messages[len(leading) :]]

    def _takes(self, roles: tuple[str, str]) -> bool:
        """Whether a prompt shows both of two leading instructions of these roles: tried once."""
        if roles not in self._takes_both:
            first, second = ({"role": role, "content": role + MARK + role} for role in roles)
            second["content"] *= 2
            user = {"role": "user", "content": "Hello."}
            try:
                text = self._rendered([first, second, user], {"add_generation_prompt": True})
            except Exception:  # a template refuses in its own way
                text = ""
            once = text.replace(second["content"], "")
            self._takes_both[roles] = text != once and first["content"] in once
        return self._takes_both[roles]


def text_arguments(messages: Messages) -> Iterator[str]:
    """Where arguments of calls are no object: messages[1].tool_calls[0].function.arguments."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and not isinstance(function.get("arguments"), dict):
                yield f"messages[{i}].tool_calls[{j}].function.arguments"


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls all have an object for arguments."""
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def merged_content(contents: list[Any]) -> Any:
    """The contents of several messages as one: texts with an empty line between, or all parts."""
    if all(content is None or isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def not_compiled(why: str) -> TokenizerError:
    """The error for a template that is no template."""
    return TokenizerError(
        f"The chat template does not compile: {why[:300]}.",
        "Mend it, or name another file with --chat-template.",
    )


def find_template(folder: Path, config: dict[str, Any], file: Path | None = None) -> str | None:
    """The operator's file, else chat_template.jinja, else the config's; None without any."""
    source = config.get("chat_template")
    if isinstance(source, list):
        source = next((e.get("template") for e in source if e.get("name") == "default"), None)
    template_file = folder / "chat_template.jinja"
    if file is not None or template_file.exists():
        source = read_template(file or template_file)
    elif source is None:
        source = (read_document(folder, "chat_template.json") or {}).get("chat_template")
    return source if isinstance(source, str) else None


def mark_last(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark behind the text of the last: there the model shall go on."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise RequestError(
            "Only a last message that holds text can be continued.",
            param="continue_final_message",
            code="invalid_value",
        )
    return [*messages[:-1], {**messages[-1], "content": content + MARK}]


def cut_at_mark(text: str) -> str:
    """`text` up to the mark; where the template trimmed the message, its end is trimmed too."""
    end = text.rfind(MARK.strip())
    if end < 0:
        raise RequestError(
            "The chat template rewrites the last message, so it cannot be continued.",
            param="continue_final_message",
            code="invalid_value",
        )
    return text[:end] if text.startswith(MARK, end) else text[:end].rstrip()


def read_template(path: Path) -> str:
    """The template's text; TokenizerError names the file."""
    try:
        return read_text(path, MOST_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8"
        raise TokenizerError(
            f"The chat template {path} cannot be read: {why}.", "Check --chat-template."
        ) from error


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, as text: {"content": "<s>", …} → "<s>"."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    values = {name: config.get(name) for name in names}
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in values.items()
        if value
    }


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own escapes <, > and &, which models have not seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message: str) -> None:
    """What `raise_exception` in a template calls."""
    raise TemplateRefusedError(message)


def strftime_now(format: str) -> str:
    """Today, for templates that tell the model the date."""
    return datetime.datetime.now().strftime(format)
