"""Chat template of a model: messages in, text of the prompt out.

Templates are Jinja, as in transformers: sandboxed, blocks trimmed, with `raise_exception`,
`strftime_now`, `tojson` and {% generation %}. Only the model's own template or the operator's file
is used, never one of a request. A `ChatTemplate` has no limits of its own: it is compiled and
rendered in the process `frontend.text.render_process`, a client of which is `rendering.Renderer`.
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
"""Roles of messages with instructions."""


class TemplateRefusedError(Exception):
    """A template called raise_exception."""


class Unfolded(CodeGenerator):
    """Code generator without constant folding: {{ "a" * 10**10 }} would be built on compiling."""

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
    """{% generation %} … {% endgeneration %}: text of the assistant, for masks in training.

    A prompt uses the text alone. The block is a call, as in transformers: variables set inside are
    not visible after it.
    """

    tags = {"generation"}  # noqa: RUF012  (the name that Jinja reads)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """Compiled template and the special tokens that it may name."""

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
        """Return the text of the prompt; with `continue_final_message` it ends in the last message.

        For a template without the role developer that role becomes system; see `_instructed`.
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
        """Raise RequestError if arguments of an earlier call that are no object caused the failure.

        A model may have written anything; some templates write text unchanged, others need the
        pairs of an object.
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
        """Return the messages with leading instructions merged if the template takes only one."""
        leading = [*takewhile(lambda message: message.get("role") in INSTRUCTIONS, messages)]
        roles = [message["role"] for message in leading]
        if all(self._takes(pair) for pair in pairwise(roles)):
            return messages
        merged = {**leading[0], "content": merged_content([m.get("content") for m in leading])}
        return [merged, *messages[len(leading) :]]

    def _takes(self, roles: tuple[str, str]) -> bool:
        """Return whether a prompt has both of two leading instructions of these roles (cached)."""
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
    """Yield the paths of arguments that are no object, as messages[1].tool_calls[0].function…."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls") or ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and not isinstance(function.get("arguments"), dict):
                yield f"messages[{i}].tool_calls[{j}].function.arguments"


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of all calls replaced by an empty object."""
    calls = [
        {**call, "function": {**call["function"], "arguments": {}}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def merged_content(contents: list[Any]) -> Any:
    """Merge the contents of several messages: texts with an empty line between, or all parts."""
    if all(content is None or isinstance(content, str) for content in contents):
        return "\n\n".join(filter(None, contents))
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def not_compiled(why: str) -> TokenizerError:
    """Return the error for a template that does not compile."""
    return TokenizerError(
        f"The chat template does not compile: {why[:300]}.",
        "Mend it, or name another file with --chat-template.",
    )


def find_template(folder: Path, config: dict[str, Any], file: Path | None = None) -> str | None:
    """Return the operator's file, else chat_template.jinja, else the config's template, or None."""
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
    """Return the messages with a mark at the end of the last one, where the model continues."""
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise RequestError(
            "Only a last message that holds text can be continued.",
            param="continue_final_message",
            code="invalid_value",
        )
    return [*messages[:-1], {**messages[-1], "content": content + MARK}]


def cut_at_mark(text: str) -> str:
    """Return `text` up to the mark; trimmed where the template trimmed the message."""
    end = text.rfind(MARK.strip())
    if end < 0:
        raise RequestError(
            "The chat template rewrites the last message, so it cannot be continued.",
            param="continue_final_message",
            code="invalid_value",
        )
    return text[:end] if text.startswith(MARK, end) else text[:end].rstrip()


def read_template(path: Path) -> str:
    """Return the text of a template; TokenizerError with the name of the file."""
    try:
        return read_text(path, MOST_TEMPLATE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8"
        raise TokenizerError(
            f"The chat template {path} cannot be read: {why}.", "Check --chat-template."
        ) from error


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return bos_token and others as text: {"content": "<s>", …} → "<s>"."""
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
    """Return JSON as in transformers; Jinja's own filter escapes <, > and &, unlike in training."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message: str) -> None:
    """Implement `raise_exception` of templates."""
    raise TemplateRefusedError(message)


def strftime_now(format: str) -> str:
    """Return the present date, for templates that tell the model the date."""
    return datetime.datetime.now().strftime(format)
