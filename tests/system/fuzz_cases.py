"""Bodies of every dialect, values of every kind, and how one is bent."""

import random
from typing import Any

from error_cases import STRUCTS

from headway.server.anthropic.schema import MessagesBody
from headway.server.responses.schema import ResponsesBody

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TAKEN = {**STRUCTS, RESPONSES: ResponsesBody, MESSAGES: MessagesBody}
FIELDS = {
    path: [*struct.__struct_fields__, "unknown", "tools", "user"] for path, struct in TAKEN.items()
}
ATOMS: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3, 16, 17, 100, 383, 384, 511, 512, 2**31, 2**53, 2**63),
    *(2**64, -(2**63), -(2**70), 10**300, 0.0, 0.5, 1.0, -0.5, 2.0, 1e-9, 1e-320, 1e308, -1e308),
    *("", "a", "hi", "é🌊", "\0", "\x1b[31m", "\r\n", "x" * 3000, "auto", "text", "NaN", "5", "-5"),
    *("user", "assistant", "system", "tiny", "nickname", "another", "<|im_end|>"),
]
GOOD: dict[str, list[Any]] = {
    "model": ["tiny", "nickname"],
    "n": [1, 2, 5],
    "temperature": [0, 0.7, 2],
    "top_p": [0, 0.3, 1],
    "top_k": [-1, 0, 1, 50, 10**9],
    "min_p": [0, 0.5, 1],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "repetition_penalty": [0.01, 1.3, 100],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "max_tokens": [0, 1, 7, 400],
    "max_completion_tokens": [1, 7],
    "min_tokens": [0, 1, 5],
    "stop": ["e", ["the", "a"], [" "]],
    "stop_token_ids": [[], [5], list(range(384))],
    "ignore_eos": [True, False],
    "logit_bias": [{"2": 100}, {"5": -100, "6": 100}, {str(i): -100 for i in range(384)}],
    "allowed_token_ids": [[], [2], [5, 5, 6], list(range(384))],
    "prompt_logprobs": [0, 1, 20],
    "logprobs": [True, 0, 5, 20],
    "top_logprobs": [0, 20],
    "stream": [True],
    "stream_options": [{"include_usage": True}, {"include_usage": False}],
    "echo": [True],
    "prompt": ["hi", ["a", "b"], [5, 6], [[5], [6, 7]], ["x"] * 20],
    "return_token_ids": [True],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "chat_template_kwargs": [{"self": 1}, {"a": {}}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}},
    ],
    "structured_outputs": [
        {"regex": "[ab]{1,4}"},
        {"choice": ["a", "b"]},
        {"grammar": 'start: "x"'},
        {"json": {"not": {}}},
    ],
    "input": ["hi", [], [{"role": "user", "content": "hi"}], [{"type": "function_call"}], [{}]],
    "instructions": ["be", ""],
    "max_output_tokens": [1, 7],
    "previous_response_id": ["resp_", "resp_0"],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
    "metadata": [{"a": "b"}],
    "store": [True, False],
    "background": [True, False],
    "text": [{"format": {"type": "text"}}, {"verbosity": "low"}],
    "reasoning": [{"effort": "low"}],
    "system": ["be", [{"type": "text", "text": "be"}]],
    "stop_sequences": [["e"], [" "]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}],
    "output_config": [{"effort": "low"}],
    "slo": [{"ttft_ms": 500}],
}


def anything(random: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = random.random()
    if depth < 3 and kind < 0.15:
        return [anything(random, depth + 1) for _ in range(random.choice((0, 1, 2, 5)))]
    if depth < 3 and kind < 0.3:
        return {
            str(random.choice(ATOMS)): anything(random, depth + 1)
            for _ in range(random.choice((0, 1, 3)))
        }
    return random.choice(ATOMS)


def mutate(random: random.Random, value: Any) -> Any:
    """`value` with something in it changed."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice(list(value))
        return {**value, key: mutate(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], mutate(random, value[at]), *value[at + 1 :]]
    return anything(random)


def check_anthropic(status: int, content: Any) -> None:
    """The one shape that errors of Messages have."""
    assert status in (400, 401, 403, 404, 405, 413, 429, 503), (status, content)
    assert set(content) == {"type", "error", "request_id"} and content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    assert 0 < len(content["error"]["message"]) < 2000
