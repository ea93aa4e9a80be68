"""What brought down, opened or read other servers in 2025 and 2026, sent to ours.

Each case is the request of an advisory, or its like here. It is answered or refused by name, at
once, and the server is as it was. docs/security.md has the whole list.
"""

from typing import Any

import msgspec
import pytest
from live_server import LiveServer

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "user", "content": "hi"}]


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"model": "tiny", "prompt": "hi", "max_tokens": 2, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "tiny", "messages": SAID, "max_tokens": 2, **fields}


def with_image(url: str) -> tuple[str, dict[str, Any]]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return chat(messages=[{"role": "user", "content": [part]}])


def with_tool(**parameters: Any) -> tuple[str, dict[str, Any]]:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": parameters}}}
    return chat(tools=[{"type": "function", "function": function}], tool_choice="required")


REFUSED: dict[str, tuple[tuple[str, Any], str | None]] = {
    "CVE-2025-48942 invalid schema": (
        text(structured_outputs={"json": {"type": "strin"}}),
        "structured_outputs.json",
    ),
    "CVE-2025-48943 invalid regex": (
        text(structured_outputs={"regex": "("}),
        "structured_outputs.regex",
    ),
    "CVE-2025-48944 tool type": (with_tool(type="strange"), "tools"),
    "CVE-2025-48944 tool pattern": (with_tool(type="string", pattern="("), "tools"),
    "CVE-2025-61620 template": (chat(chat_template="{{ 1 }}"), "chat_template"),
    "CVE-2025-6242 image of this server": (with_image("http://127.0.0.1/metrics"), None),
    "CVE-2026-24779 image behind a backslash": (with_image("http://a\\@127.0.0.1/"), None),
    "CVE-2026-15974 image of a file": (with_image("file:///etc/passwd"), None),
    "CVE-2025-62164 embeddings of a prompt": (text(prompt_embeds="gASV"), "prompt_embeds"),
    "CVE-2026-7304 code of a processor": (
        text(custom_logit_processor="8004952e"),
        "custom_logit_processor",
    ),
    "CVE-2026-34756 n": (text(n=2**31), "n"),
    "CVE-2026-73559 prompts": (text(prompt=["a"] * 100_000), "prompt"),
    "CVE-2026-54235 infinite temperature": (
        (TEXT, b'{"model":"tiny","prompt":"hi","temperature":1e999}'),
        None,
    ),
    "CVE-2026-54235 NaN": ((TEXT, b'{"model":"tiny","prompt":"hi","temperature":NaN}'), None),
    "CVE-2026-21869 negative n_discard": (text(n_discard=-1), "n_discard"),
    "CVE-2026-21869 negative id": (text(prompt=[-1]), "prompt[0]"),
    "CVE-2026-54234 id behind the last": (text(prompt=[2**31]), "prompt[0]"),
}
GONE = (
    *("/load_lora_adapter_from_tensors", "/update_weights_from_disk", "/v1/load_lora_adapter"),
    *("/v1/rerank", "/v1/audio/transcriptions", "/v1/images/edits", "/guardrails/test_custom_code"),
    *("/prompts/test", "/config/update", "/key/block", "/server_info", "/invocations"),
)


@pytest.fixture(scope="module")
def probed(server: LiveServer) -> list[int]:
    return server.probe()


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_advisory_sends_is_refused_by_name(
    server: LiveServer, probed: list[int], name: str
) -> None:
    (path, body), param = REFUSED[name]
    status, answer = server.post(path, body)
    assert status == 400, answer
    error = answer["error"]
    assert param is None or str(error["param"]).startswith(param), error
    for leak in ("0x7f", "/src/", "site-packages", "Traceback", 'File "'):
        assert leak not in error["message"]
    assert server.probe() == probed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_malformed_body_is_told_nothing_of_the_server(server: LiveServer, path: str) -> None:
    """CVE-2026-54236 and CVE-2026-73555: addresses and paths in the words of an error."""
    for body in (b"{", b'{"model": [', b'{"model": 5}', b'{"messages": "x"}', b"\xff", b"[]", b""):
        status, answer = server.post(path, body)
        assert status in (400, 404)
        text = msgspec.json.encode(answer).decode()
        for leak in (" at 0x", "/headway/", "site-packages", "Traceback", "Error("):
            assert leak not in text


@pytest.mark.parametrize("path", GONE)
def test_what_loads_or_runs_a_clients_code_is_not_there(server: LiveServer, path: str) -> None:
    for body in ({}, {"code": "import os"}, {"serialized_named_tensors": ["gASV"]}):
        assert server.post(path, body)[0] == 404


def test_template_options_change_no_template(server: LiveServer) -> None:
    """CVE-2025-61620 and CVE-2025-62426: options that replace the template, or the tokenizing."""

    def prompt_tokens(**options: Any) -> int:
        status, answer = server.post(*chat(chat_template_kwargs=options))
        assert status in (200, 400), answer
        return answer["usage"]["prompt_tokens"] if status == 200 else plain

    plain = 0
    plain = prompt_tokens()
    bomb = "{% for i in range(10**9) %}x{% endfor %}"
    assert prompt_tokens(chat_template=bomb) == plain
    assert prompt_tokens(tokenize=True, add_generation_prompt=True) == plain
    assert prompt_tokens(messages=[], template=bomb) == plain


def test_penalties_and_spelled_tokens_disturb_nobody(server: LiveServer, probed: list[int]) -> None:
    """CVE-2026-44223: penalties beside others. CVE-2026-44222: text that spells special tokens."""
    penalties = {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 1.9}
    assert server.post(*text(**penalties))[0] == 200
    spelled = "<|im_start|>system<|im_end|><|image_pad|><|vision_start|><image></s><unk>"
    assert server.post(*text(prompt=spelled))[0] == 200
    assert server.post(*chat(messages=[{"role": "user", "content": spelled}]))[0] == 200
    assert server.probe() == probed


def test_one_grammar_after_another_disturbs_nobody(server: LiveServer, probed: list[int]) -> None:
    """CVE-2025-29770, CVE-2025-32381: one schema after another. The bound is shown by
    test_the_cache_is_bounded_in_bytes; here, that they are served and disturb nobody."""
    for number in range(20):
        schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
        assert server.post(*text(structured_outputs={"json": schema}))[0] == 200
    assert server.probe() == probed
