"""Formats of tool calls: one file and one row per format, chosen by the text of the chat template.

A template with tools also writes earlier calls, so it contains the marks of its format. The first
row whose signs all occur in the template is used; `--tool-call-parser` names another.
"""

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.frontend.text.source import TextSource, Wait
from headway.frontend.text.tools import gemma, granite, hermes, llama, mistral, qwen_xml
from headway.frontend.text.tools.written import GemmaArguments, Written

ID_CHARACTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return an id in OpenAI's form: "call_" and 24 letters and digits."""
    return "call_" + "".join(secrets.choice(ID_CHARACTERS) for _ in range(24))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format of tool calls.

    `signs` identify it in a template; `parse` is its parser; `markers` are texts that the parser
    needs even if they are special tokens; `written` describes it for a grammar. `short_ids`: its
    templates accept only ids of nine letters and digits. `in_messages`: tools, calls and results
    are written into the messages (generic.py), not passed to the template.
    """

    name: str
    signs: tuple[str, ...]
    parse: Callable[[TextSource], Wait[None]]
    markers: tuple[str, ...]
    written: Written
    new_id: Callable[[], str] = new_call_id
    short_ids: bool = False
    in_messages: bool = False


def gemma_format(name: str, marks: gemma.GemmaMarks) -> ToolFormat:
    """Return the format of one of the two generations of Gemma."""
    return ToolFormat(
        name=name,
        signs=(marks.open,),
        parse=marks.parse,
        markers=(marks.open, marks.close, marks.quote),
        written=Written(
            before_name=f"{marks.open}call:",
            after_name="",
            after_arguments=marks.close,
            arguments=GemmaArguments(marks.quote),
        ),
    )


FORMATS = (
    ToolFormat(
        name="qwen3_coder",
        signs=(qwen_xml.OPEN, qwen_xml.FUNCTION, qwen_xml.PARAMETER),
        parse=qwen_xml.parse,
        markers=(qwen_xml.OPEN, qwen_xml.CLOSE),
        written=Written(
            before_name=f"{qwen_xml.OPEN}\n{qwen_xml.FUNCTION}",
            after_name=">\n",
            after_arguments=f"{qwen_xml.END_FUNCTION}\n{qwen_xml.CLOSE}",
            between="\n",
            arguments=qwen_xml.ElementArguments(),
        ),
    ),
    ToolFormat(
        name="hermes",
        signs=(hermes.OPEN, "arguments"),
        parse=hermes.parse,
        markers=(hermes.OPEN, hermes.CLOSE),
        written=Written(
            before_name=hermes.OPEN + '\n{"name": "',
            after_name='", "arguments": ',
            after_arguments="}\n" + hermes.CLOSE,
            between="\n",
        ),
    ),
    ToolFormat(
        name="mistral",
        signs=(mistral.TAG, mistral.ARGS),
        parse=mistral.parse,
        markers=(mistral.TAG, mistral.ID, mistral.ARGS),
        written=Written(
            before_name=mistral.TAG, after_name=mistral.ARGS, after_arguments="", between=""
        ),
        new_id=mistral.new_id,
        short_ids=True,
    ),
    ToolFormat(
        name="mistral_list",
        signs=(mistral.TAG,),
        parse=mistral.parse,
        markers=(mistral.TAG, mistral.ID, mistral.ARGS),
        written=Written(
            opens=mistral.TAG + "[",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            between=", ",
            closes="]",
        ),
        new_id=mistral.new_id,
        short_ids=True,
    ),
    gemma_format("gemma4", gemma.GEMMA_4),
    gemma_format("functiongemma", gemma.FUNCTION_GEMMA),
    ToolFormat(
        name="granite",
        signs=(granite.OPEN,),
        parse=granite.parse,
        markers=(granite.OPEN, granite.CLOSE),
        written=Written(
            opens=granite.OPEN + "[",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            between=", ",
            closes="]",
        ),
    ),
    ToolFormat(
        name="llama3_json",
        signs=('"parameters": ',),
        parse=llama.parse,
        markers=(llama.TAG,),
        written=Written(
            before_name='{"name": "',
            after_name='", "parameters": ',
            after_arguments="}",
            between="; ",
            marked=False,
        ),
    ),
)
HERMES = next(row for row in FORMATS if row.name == "hermes")
GENERIC = replace(HERMES, name="generic", signs=(), in_messages=True)
"""For templates without tools, only by the operator's option: no template has its signs."""
BY_NAME = {row.name: row for row in (*FORMATS, GENERIC)}


def choose_format(template: str | None) -> ToolFormat | None:
    """Return the format of a chat template's calls; None without tools or for an unknown format.

    A template that never names `tools` has none: '{{ messages }} <tool_call>'.
    """
    if template is None or not re.search(r"\btools\b", template):
        return None
    for row in FORMATS:
        if all(sign in template for sign in row.signs):
            return row
    return None
