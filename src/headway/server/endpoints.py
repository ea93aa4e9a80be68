"""The table of the endpoints that generate: what each takes, and who prepares and answers it.

`session` is the way of a body through any of them.
"""

import msgspec

from headway.server import body as bodies
from headway.server.anthropic import messages
from headway.server.anthropic import schema as anthropic_schema
from headway.server.anthropic.schema import MessagesBody
from headway.server.fields import ELSEWHERE
from headway.server.generation import GenerationRow
from headway.server.openai import chat, completions
from headway.server.openai.schema import NO_OPS, ChatBody, CompletionBody
from headway.server.responses import create as responses
from headway.server.responses import schema as responses_schema
from headway.server.responses.schema import ResponsesBody

BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)


def accepts(
    body: type[msgspec.Struct],
    no_ops: frozenset[str],
    refused: frozenset[str] = frozenset(),
    unheeded: tuple[str, ...] = (),
) -> bodies.Accepts:
    """What an endpoint takes; beside `refused` it refuses what only others honour."""
    honoured_somewhere = {name for other in BODIES for name in other.__struct_fields__}
    known = no_ops.union(body.__struct_fields__)
    return bodies.Accepts(
        body, no_ops, (refused | ELSEWHERE | honoured_somewhere) - known, unheeded
    )


GENERATIONS = (
    GenerationRow(
        path="/v1/chat/completions",
        accepts=accepts(ChatBody, NO_OPS),
        prepare=chat.prepare,
        prefix="chatcmpl-",
        lengths=("max_completion_tokens", "max_tokens", "n_predict"),
    ),
    GenerationRow(
        path="/v1/completions",
        accepts=accepts(CompletionBody, NO_OPS),
        prepare=completions.prepare,
        chats=False,
        prefix="cmpl-",
        prompt="prompt",
        lengths=("max_tokens", "n_predict"),
    ),
    GenerationRow(
        path="/v1/responses",
        accepts=accepts(ResponsesBody, responses_schema.NO_OPS, responses_schema.REFUSED),
        prepare=responses.prepare,
        prefix=responses.PREFIX,
        respond=responses.respond,
        prompt="input",
        lengths=("max_output_tokens",),
        elsewhere=False,
    ),
    GenerationRow(
        path="/v1/messages",
        accepts=accepts(
            MessagesBody,
            anthropic_schema.NO_OPS,
            anthropic_schema.REFUSED,
            anthropic_schema.UNHEEDED,
        ),
        prepare=messages.prepare,
        prefix="msg_",
    ),
)
