"""Grammar bombs: two dozen hostile grammars, each answered soon, and nobody else notices."""

import itertools
import threading
import time
import urllib.request
from typing import Any

import msgspec
import pytest
from live_server import LiveServer

from conftest import StartServer


def nested_any_of(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


MANY_RULES = "\n".join(f'r{i}: "k{i}" start?' for i in range(3000))
RULE_NAMES = " | ".join(f"r{i}" for i in range(3000))
GBNF_CHAIN = (
    "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(8000)) + '\nr8000 ::= "x"'
)
DOUBLING = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
BOMBS: dict[str, dict[str, Any]] = {
    "exponential automaton": {"regex": "(a|b)*a(a|b){20}"},
    "repeated wildcards": {"regex": "(.*a){12}.{30}b"},
    "optional and required": {"regex": "(a?){200}a{200}"},
    "nested repetition": {"regex": "((a{1,50}b){1,50}c){1,50}"},
    "huge repetition": {"regex": "(ab|cd|ef){1,100000}x"},
    "unicode classes": {"regex": r"\p{L}{1,3000}\p{N}{1,3000}"},
    "long text": {"regex": "(.|\\n){0,100000}end"},
    "many branches": {"regex": "|".join(f"w{i}[a-z]*{i}" for i in range(5000))},
    "ambiguous": {"grammar": 'start: a\na: a a | "a"'},
    "deep recursion": {"grammar": 'start: "(" start ")" | "[" start "]" | "x"?'},
    "too many rules at once": {"grammar": f"start: {RULE_NAMES}\n{MANY_RULES}"},
    "empty loops": {"grammar": 'start: a*\na: b*\nb: "x"?'},
    "intersection and complement": {
        "grammar": "start: A\nA: /(a|b)*a(a|b){15}/ & ~/(a|b)*b(a|b){15}/"
    },
    "GBNF in deep groups": {"grammar": f"root ::= {'(' * 20000}x{')' * 20000}"},
    "GBNF in a long chain": {"grammar": GBNF_CHAIN},
    "GBNF without an end": {"grammar": 'root ::= root root | "a"'},
    "GBNF that is none": {"grammar": "root ::= [a-\nroot ::= )("},
    "doubling schema": {"json": nested_any_of(12)},
    "doubling references": {
        "json": {"$defs": {**DOUBLING, "d60": {"type": "string"}}, "$ref": "#/$defs/d0"}
    },
    "many values": {"json": {"enum": [f"value {i}" for i in range(12000)]}},
    "many patterns": {
        "json": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50}}}$"} for i in range(2000)
            },
        }
    },
    "intersecting patterns": {
        "json": {"allOf": [{"type": "string", "pattern": f"a{{{i}}}.*b"} for i in range(30)]}
    },
    "multiples of a large prime": {"json": {"type": "integer", "multipleOf": 99991}},
    "long arrays": {"json": {"type": "array", "minItems": 100000, "items": {"type": "integer"}}},
}


def ask(live: LiveServer, rule: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
    """(status, body, seconds) of a short answer under `rule`."""
    started_s = time.monotonic()
    body = {"model": live.model, "prompt": "x", "max_tokens": 8, "structured_outputs": rule}
    status, content = live.post("/v1/completions", body)
    return status, content, time.monotonic() - started_s


def test_grammar_bombs_hurt_nobody(start_server: StartServer) -> None:
    """Class "grammar bombs": 200 or a 400 that says why, the same engine, the same probe."""
    live = start_server().wait_ready()
    engine, alone = live.engine_pid(), live.probe()
    for name, rule in BOMBS.items():
        status, content, _ = ask(live, rule)
        assert status in (200, 400), (name, content)
        if status == 400:
            codes = ("grammar_too_complex", "invalid_value", "unsupported_keyword")
            assert content["error"]["code"] in codes, (name, content)
            assert content["error"]["param"].startswith("structured_outputs."), name
    assert live.engine_pid() == engine and live.probe() == alone
    assert live.idle()


@pytest.mark.hardening
def test_grammar_bombs_are_answered_within_two_seconds(start_server: StartServer) -> None:
    """And a stream beside them keeps its pace: p99 of its gaps at most 1.5 times, or 20 ms."""
    live = start_server().wait_ready()
    ask(live, {"regex": "warm"})
    quiet = sorted(gaps(live))
    beside: list[float] = []
    going = threading.Event()

    def stream() -> None:
        while not going.is_set():
            beside.extend(gaps(live))

    thread = threading.Thread(target=stream)
    thread.start()
    times = {name: ask(live, rule)[2] for name, rule in BOMBS.items()}
    going.set()
    thread.join()
    assert max(times.values()) <= 2.0, times
    beside.sort()
    quiet_p99, beside_p99 = (values[int(len(values) * 0.99)] for values in (quiet, beside))
    assert beside_p99 <= max(1.5 * quiet_p99, 0.02), (quiet_p99, beside_p99)


def gaps(live: LiveServer) -> list[float]:
    """Seconds between the chunks of one streamed answer of 100 tokens."""
    body = {"model": live.model, "prompt": "y", "max_tokens": 100, "ignore_eos": True}
    data = msgspec.json.encode({**body, "temperature": 0, "stream": True})
    request = urllib.request.Request(
        live.url + "/v1/completions", data=data, headers={"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        came_s = [time.monotonic() for line in answer if line.startswith(b"data: {")]
    return [after - before for before, after in itertools.pairwise(came_s)]
