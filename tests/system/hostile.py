"""Bodies that nobody should send, to every address that takes one: made from a seed, one by one.

A body begins as a good one of its dialect. Fields are set to good values of other bodies (so that
they contradict each other), to anything at all, or to what only other servers know; then its JSON
is perhaps broken: cut off, of another encoding, with numbers, strings or depths that are no good.
"""

import gzip
import json
import random
from dataclasses import dataclass, field
from typing import Any

from error_cases import CHAT, TEXT
from fuzz_cases import ATOMS, FIELDS, GOOD, MESSAGES, RESPONSES, anything, mutate

from headway.server.fields import FOREIGN_FIELDS, NEUTRAL_VALUES

USER = {"role": "user", "content": "What is 2 + 3?"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": TOOL}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED: list[Any] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "5"},
]
PARTS: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
USE = {"type": "tool_use", "id": "c1", "name": "add", "input": {}}
BLOCKS: list[Any] = [
    *PARTS,
    {"role": "assistant", "content": [USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "5"}]},
]
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "5"},
]
STARTS: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": [USER], "max_tokens": 4},
        {"messages": CALLED, "tools": [FUNCTION], "max_tokens": 8},
        {"messages": [USER], "tools": [FUNCTION], "tool_choice": "required", "max_tokens": 40},
        {"messages": PARTS, "stream": True},
    ],
    TEXT: [
        {"prompt": "Once upon a time", "max_tokens": 4},
        {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 2, "echo": True},
    ],
    RESPONSES: [
        {"input": "hi", "max_output_tokens": 4},
        {"input": ITEMS, "max_output_tokens": 4, "tools": [{"type": "function", **TOOL}]},
    ],
    MESSAGES: [
        {"messages": [USER], "max_tokens": 4},
        {
            "messages": BLOCKS,
            "max_tokens": 4,
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
        },
    ],
    "/v1/responses/input_tokens": [{"input": "hi"}, {"input": ITEMS}],
    "/v1/messages/count_tokens": [{"messages": [USER]}, {"messages": BLOCKS, "system": "be"}],
    "/v1/responses/{response_id}/cancel": [{}],
    "/v1/batches": [{"endpoint": CHAT, "completion_window": "24h", "input_file_id": "FILE"}],
    "/v1/batches/{id}/cancel": [{}],
    "/v1/messages/batches": [
        {"requests": [{"custom_id": "a", "params": {"messages": [USER], "max_tokens": 4}}]}
    ],
    "/v1/messages/batches/{id}/cancel": [{}],
    "/v1/outcomes": [{"task_id": "task-1", "success": True, "score": 0.5}],
    "/cache/forget": [{"cache_salt": "one"}],
    "/v1/files": [],
    "/tokenize": [{"prompt": "hi"}, {"messages": [USER], "return_token_strs": True}],
    "/detokenize": [{"tokens": [5, 6, 7]}],
    "/apply-template": [{"messages": CALLED, "tools": [FUNCTION]}],
}
"""Good bodies by address; `FILE` becomes the id of a file, an upload is made by `form`."""
ELSEWHERE_PATHS = (
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/pooling", "/api/chat", "/api/generate"),
    *("/completion", "/v1/audio/transcriptions", "/invocations", "/generate", "/infill", "/"),
)
"""Addresses of other servers: 404 or 405, whatever is sent."""
NAMES = sorted(
    {*FOREIGN_FIELDS, *NEUTRAL_VALUES, *(name for names in FIELDS.values() for name in names)}
)
VALUES: dict[str, list[Any]] = {
    **GOOD,
    "messages": [[USER], CALLED, BLOCKS, [], [USER] * 40, [{"role": "system", "content": ""}]],
    "tools": [[FUNCTION], [], [FUNCTION] * 3, [{"type": "web_search"}], [{"name": "x"}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "b"}}],
    "model": ["tiny"],
    "guided_json": [SCHEMA, json.dumps(SCHEMA), {"$ref": "#"}, {"$ref": "http://127.0.0.1:1/"}],
    "guided_regex": ["(a+)+b", "[", "a{1000000000}", "\\p{L}*", "(?=a)b", ""],
    "guided_choice": [["a", "b"], [], ["a" * 10_000], [""]],
    "grammar": ["root ::= root", 'start: "a" start', "start: /(/", "root ::= [^]"],
    "truncate_prompt_tokens": [-1, 0, 1, 2**40],
    "reasoning_effort": ["low", "none", "\udfff"],
    "documents": [[{"text": "x"}], [{}]],
    "tokens": [[5], [-1], [2**63], list(range(4000)), [[5]]],
    "slo": [{"ttft_ms": 500}, {"ttft_ms": -1}, {"tpot_ms": 1e308}, {"what": 1}],
}
STRANGE_TEXTS = ("\ud800", "\U0010ffff" * 99, "‮abc", "a\u0301" * 500, "<|im_end|>" * 50, "{{7*7}}")
BROKEN_VALUES = (
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"01", b"0x10", b"1" * 400, b"1." * 3),
    *(b"9" * 5000, b"1e-400", b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xed\xa0\x80"', b'"\xff\xfe"'),
    *(b'"\xc0\xaf"', b'"\x01"', b'"\\x"', b"undefined", b"'a'", b"[1,]", b'{"a":1,}', b"tru", b""),
    *(b"[" * 60 + b"]" * 60, b"[" * 5000, b"[" * 900 + b"]" * 900),
    b'{"a":' * 300 + b"1" + b"}" * 300,
    *(b'"' + b"x" * 200_000 + b'"', b'"' + b"a b" * 1_000_000 + b'"'),
    *(b'"' + b"\\u0000" * 9000 + b'"', b"[" + b"{}," * 9000 + b"{}]"),
)
"""Values as they stand in the JSON text, most of them none."""


@dataclass
class Attack:
    """One request: where to, its headers and its body."""

    path: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"POST {self.path} {self.headers} {self.data[:3000]!r}"


def make_fields(rng: random.Random, start: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """`start` with fields of its own and of others set, changed and taken out."""
    body = dict(start)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 9))):
        name = rng.choice(names)
        body[name] = rng.choice(VALUES.get(name, [*ATOMS, *STRANGE_TEXTS]))
    for _ in range(rng.choice((0, 0, 1, 2))):
        kind = rng.random()
        if kind < 0.4:
            body = mutate(rng, body)
        elif kind < 0.6:
            body[rng.choice(names)] = anything(rng)
        elif kind < 0.8:
            body[rng.choice(NAMES)] = rng.choice([*ATOMS, [], {}, [1]])
        elif body:
            body.pop(rng.choice(list(body)))
        if not isinstance(body, dict):
            return {"prompt": body}
    return body


def break_text(rng: random.Random, body: dict[str, Any]) -> bytes:
    """JSON of `body` that is perhaps none: a value of bytes, a name twice, or the bytes changed."""
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    kind = rng.random()
    if kind < 0.5 and body:
        name = json.dumps(rng.choice([*body, "x"])).encode()
        added = name + b":" + rng.choice(BROKEN_VALUES)
        first = rng.random() < 0.5  # the same name twice, the broken one before or behind
        return b"{" + added + b"," + text[1:] if first else text[:-1] + b"," + added + b"}"
    at = rng.randrange(len(text) + 1)
    ways = (
        text[:at],
        text[:at] + rng.randbytes(rng.choice((1, 3, 40))) + text[at:],
        text[:at] + text[at + 1 :],
        text + text,
        text + b"\0" * 3,
        b"\xef\xbb\xbf" + text,
        text.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32"))),
        b"[" + text + b"]",
        b"// hi\n" + text,
        b'{"a":' * at + text,
        gzip.compress(text, mtime=0),
        rng.randbytes(at),
    )
    return rng.choice(ways)


HEADERS = (
    *({"content-type": kind} for kind in ("text/plain", "application/xml", "multipart/form-data")),
    *({"content-type": kind} for kind in ("", "application/json; charset=utf-16", "a" * 4000)),
    *({"content-encoding": kind} for kind in ("gzip", "br", "identity")),
    *({"accept": "text/event-stream"}, {"expect": "200-ok"}, {"x-request-id": "y" * 300}),
    *({"authorization": "Bearer " + "é" * 200}, {"origin": "null"}, {"content-language": "x"}),
)


def form(rng: random.Random) -> Attack:
    """An upload: a good one, or with parts, names and boundaries that are no good."""
    mark = rng.choice(("b", "b" * 70, "b" * 71, "ü", 'b"', ""))
    name = rng.choice(("file", "file", "purpose", "x", "", "a" * 2000, "\0"))
    heads = [
        f'name="{name}"; filename="a.jsonl"',
        f'name="{name}"',
        "name=file; filename*=utf-8''%ff",
        "name=file; filename*=idna''x",
        ";" * 500,
        "",
    ]
    lines = b"\n".join(break_text(rng, rng.choice(STARTS[CHAT])) for _ in range(3))
    parts = [
        (rng.choice(heads), rng.choice((lines, b"", b"x" * 50_000, b"\0\xff"))),
        ("name=purpose", rng.choice((b"batch", b"batch", b"evals", b"", b"\xff", b"x" * 3000))),
    ]
    rng.shuffle(parts)
    data = b"".join(
        b"--%s\r\ncontent-disposition: form-data; %s\r\n\r\n%s\r\n"
        % (mark.encode(), head.encode(), content)
        for head, content in parts[: rng.choice((0, 1, 2, 2, 2))]
    )
    data += rng.choice((b"--%s--\r\n" % mark.encode(), b"--%s" % mark.encode(), b"", b"--"))
    kind = rng.choice((f"multipart/form-data; boundary={mark}", "multipart/form-data", "a/b"))
    return Attack("/v1/files", data, {"content-type": kind.encode().decode("latin-1")})


def make_attacks(count: int, seed: int, ids: dict[str, list[str]]) -> list[Attack]:
    """`count` requests of `seed`, to each address as many; `ids` are some that exist, by name."""
    rng = random.Random(seed)
    found = []
    for number in range(count):
        path = [*STARTS, CHAT, TEXT, RESPONSES, MESSAGES, "elsewhere"][number % (len(STARTS) + 5)]
        names = [*FIELDS.get(path, FIELDS[CHAT]), "messages", "tokens", "unknown"]
        start = rng.choice(STARTS.get(path) or [{"input": "hi"}])
        if path == "elsewhere":
            path = rng.choice(ELSEWHERE_PATHS)
        if path == "/v1/files" and rng.random() < 0.9:
            found.append(form(rng))
            continue
        for name, known in ids.items():
            path = path.replace("{" + name + "}", rng.choice([*known, "x", "%00", "..%2f..", "é"]))
            start = {k: rng.choice(known) if v == name else v for k, v in start.items()}
        body = make_fields(rng, start, names)
        data = break_text(rng, body) if rng.random() < 0.4 else b""
        data = data or json.dumps(body).encode()
        headers = rng.choice(HEADERS) if rng.random() < 0.1 else {}
        found.append(Attack(path, data, {"content-type": "application/json", **headers}))
    return found
