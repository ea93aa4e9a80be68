"""The table of the endpoints that generate: the body of each, how it is prepared and answered.

`session` runs a request through any of them.
"""

import msgspec

from headway.server import body as bodies
from headway.server.anthropic import messages
from headway.server.anthropic import schema as anthropic_schema
from headway.server.anthropic.schema import MessagesBody
from headway.server.fields import FOREIGN_FIELDS
from headway.server.generation import GenerationRow
from headway.server.openai import chat, completions
from headway.server.openai.schema import NO_OPS, ChatBody, CompletionBody
from headway.server.responses import create as responses
from headway.server.responses import schema as responses_schema
from headway.server.responses.schema import ResponsesBody

BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody)


def body_spec(
    body: type[msgspec.Struct],
    no_ops: frozenset[str],
    refused: frozenset[str] = frozenset(),
    nested_no_ops: tuple[str, ...] = (),
) -> bodies.BodySpec:
    """Return the body spec of an endpoint; it also refuses fields that only others honour."""
    honoured_somewhere = {name for other in BODIES for name in other.__struct_fields__}
    known = no_ops.union(body.__struct_fields__)
    return bodies.BodySpec(
        body, no_ops, (refused | FOREIGN_FIELDS | honoured_somewhere) - known, nested_no_ops
    )


GENERATIONS = (
    GenerationRow(
        path="/v1/chat/completions",
        body_spec=body_spec(ChatBody, NO_OPS),
        prepare=chat.prepare,
        id_prefix="chatcmpl-",
        length_fields=("max_completion_tokens", "max_tokens", "n_predict"),
    ),
    GenerationRow(
        path="/v1/completions",
        body_spec=body_spec(CompletionBody, NO_OPS),
        prepare=completions.prepare,
        is_chat=False,
        id_prefix="cmpl-",
        prompt_field="prompt",
        length_fields=("max_tokens", "n_predict"),
    ),
    GenerationRow(
        path="/v1/responses",
        body_spec=body_spec(ResponsesBody, responses_schema.NO_OPS, responses_schema.REFUSED),
        prepare=responses.prepare,
        id_prefix=responses.PREFIX,
        respond=responses.respond,
        prompt_field="input",
        length_fields=("max_output_tokens",),
        can_fall_back=False,
    ),
    GenerationRow(
        path="/v1/messages",
        body_spec=body_spec(
            MessagesBody,
            anthropic_schema.NO_OPS,
            anthropic_schema.REFUSED,
            anthropic_schema.NESTED_NO_OPS,
        ),
        prepare=messages.prepare,
        id_prefix="msg_",
    ),
)
