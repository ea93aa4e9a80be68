"""Batches through the official client: their life, their results, their owners."""

import io
import json
from typing import Any

import openai
import pytest

from batch_calls import begin, chat_line, ended, jsonl, line, results, upload, wait_until

# ── batches ─────────────────────────────────────────────────────────────────────────────────


def test_a_batch_completes_with_each_line_as_its_endpoint_answers(
    keyed_client: openai.OpenAI,
) -> None:
    lines = [chat_line(f"line {i}", f"What is 2 + {i}?") for i in range(12)]
    batch_id = begin(
        keyed_client, jsonl(lines), "/v1/chat/completions", metadata={"made": "by a test"}
    )
    batch = ended(keyed_client, batch_id)
    assert batch.status == "completed" and batch.error_file_id is None
    assert batch.metadata == {"made": "by a test"} and batch.model == "tiny"
    counts = batch.request_counts
    assert counts and (counts.total, counts.completed, counts.failed) == (12, 12, 0)
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0)
    assert (batch.finalizing_at or 0) <= (batch.completed_at or 0) < (batch.expires_at or 0)
    assert batch.model_extra == {"price": {"service_class": "batch", "share": 0.5, "cached": 0.1}}
    found = results(keyed_client, batch.output_file_id)
    assert found.keys() == {content["custom_id"] for content in lines}
    tokens = 0
    for content in lines:
        response = found[content["custom_id"]]["response"]
        alone = keyed_client.chat.completions.create(**content["body"])
        assert response["status_code"] == 200 and response["request_id"]
        assert (
            response["body"]["choices"][0]["message"]["content"] == alone.choices[0].message.content
        )
        tokens += response["body"]["usage"]["total_tokens"]
    assert batch.usage and batch.usage.total_tokens == tokens
    output = keyed_client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output" and output.filename == f"{batch.id}_output.jsonl"


def test_a_line_that_fails_is_in_the_error_file(keyed_client: openai.OpenAI) -> None:
    lines = [
        line("good"),
        line("hot", temperature=9),
        line("stream", stream=True),
        line("long", prompt="many words " * 2000),
        line("wrong", prompt={"a": 1}),
    ]
    batch = ended(keyed_client, begin(keyed_client, jsonl(lines), "/v1/completions"))
    assert batch.status == "completed" and batch.request_counts
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 4)
    assert results(keyed_client, batch.output_file_id).keys() == {"good"}
    errors = results(keyed_client, batch.error_file_id)
    told = {name: content["response"]["body"]["error"] for name, content in errors.items()}
    assert {name: error["param"] for name, error in told.items()} == {
        "hot": "temperature",
        "stream": "stream",
        "long": "prompt",
        "wrong": "prompt",
    }
    assert all(content["response"]["status_code"] == 400 for content in errors.values())


def test_a_line_drops_no_constraint_and_needs_no_model(keyed_client: openai.OpenAI) -> None:
    """What its endpoint refuses fails the line, by name; without a model the served one answers."""
    plain = {"prompt": [1, 2, 3], "max_tokens": 2}
    asked = {
        "no-model": {},
        "dropped": {"thinking_token_budget": 5},
        "twice": {"guided_regex": "a", "format": "json"},
        "beside": {"response_format": {"type": "json_object", "regex": "a"}},
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": plain | fields}
        for name, fields in asked.items()
    ]
    batch = ended(keyed_client, begin(keyed_client, jsonl(lines), "/v1/completions"))
    assert batch.request_counts is not None and batch.request_counts.completed == 1
    assert set(results(keyed_client, batch.output_file_id)) == {"no-model"}
    failed = results(keyed_client, batch.error_file_id)
    params = {name: line["response"]["body"]["error"]["param"] for name, line in failed.items()}
    assert params == {
        "dropped": "thinking_token_budget",
        "twice": "format",
        "beside": "response_format.regex",
    }


def test_malformed_lines_are_told_with_their_numbers(keyed_client: openai.OpenAI) -> None:
    data = b"\n".join(
        [
            json.dumps(line("a")).encode(),
            b"",
            b"{not json",
            json.dumps({**line("b"), "method": "GET"}).encode(),
            json.dumps({**line("c"), "url": "/v1/embeddings"}).encode(),
            json.dumps(line("a")).encode(),
            json.dumps(line("")).encode(),
            json.dumps(line("d", model="another")).encode(),
            json.dumps({"custom_id": "e", "method": "POST", "url": "/v1/completions"}).encode(),
            json.dumps({**line("f"), "body": []}).encode(),
            b'{"custom_id": "\xff"}',
            b"[" * 100_000,
        ]
    )
    batch = ended(keyed_client, begin(keyed_client, data, "/v1/completions"))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors and batch.errors.data
    told = [(error.line, error.code) for error in batch.errors.data]
    assert told == [
        (3, "invalid_json_line"),
        (4, "invalid_method"),
        (5, "invalid_url"),
        (6, "duplicate_custom_id"),
        (7, "invalid_custom_id"),
        (8, "model_not_found"),
        (9, "invalid_request"),
        (10, "invalid_request"),
        (11, "invalid_json_line"),
        (12, "invalid_request"),
    ]


@pytest.mark.parametrize("data", [b"", b"\n\n", b"   "])
def test_an_empty_file_fails(keyed_client: openai.OpenAI, data: bytes) -> None:
    batch = ended(keyed_client, begin(keyed_client, data, "/v1/completions"))
    assert batch.status == "failed" and batch.errors and batch.errors.data
    assert batch.errors.data[0].code == "empty_file"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-1"}, "file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "now", "seconds": 9}},
            "output_expires_after.anchor",
        ),
    ],
)
def test_a_batch_is_refused_by_the_field_at_fault(
    keyed_client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    given = {
        "input_file_id": upload(keyed_client, jsonl([line("a")])),
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    with pytest.raises(openai.APIStatusError) as caught:
        keyed_client.batches.create(**(given | fields))
    assert caught.value.param == param and caught.value.status_code in (400, 404)


def test_a_batch_wants_a_file_of_its_purpose(keyed_client: openai.OpenAI) -> None:
    file = keyed_client.files.create(file=io.BytesIO(b"{}"), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as caught:
        keyed_client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
    assert caught.value.code == "invalid_file_purpose"


def test_a_cancelled_batch_keeps_what_it_has(keyed_client: openai.OpenAI) -> None:
    lines = [line(f"{i}", max_tokens=200, ignore_eos=True) for i in range(300)]
    batch_id = begin(keyed_client, jsonl(lines), "/v1/completions")
    file_id = keyed_client.batches.retrieve(batch_id).input_file_id
    with pytest.raises(openai.BadRequestError) as caught:
        keyed_client.files.delete(file_id)
    assert caught.value.code == "file_in_use"
    wait_until(lambda: keyed_client.batches.retrieve(batch_id).request_counts.completed > 2)
    assert keyed_client.batches.cancel(batch_id).status == "cancelling"
    batch = ended(keyed_client, batch_id)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    output = results(keyed_client, batch.output_file_id)
    errors = results(keyed_client, batch.error_file_id)
    assert 2 < len(output) < 300
    assert output.keys().isdisjoint(errors) and len(output) + len(errors) == 300
    assert {content["error"]["code"] for content in errors.values()} == {"batch_cancelled"}
    assert keyed_client.batches.cancel(batch_id).status == "cancelled"
    keyed_client.files.delete(file_id)


def test_nobody_sees_anothers_files_and_batches(
    keyed_client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    batch_id = begin(keyed_client, jsonl([line("mine")]), "/v1/completions")
    batch = ended(keyed_client, batch_id)
    refused = [
        lambda: stranger.files.retrieve(batch.input_file_id),
        lambda: stranger.files.content(batch.output_file_id or ""),
        lambda: stranger.files.delete(batch.input_file_id),
        lambda: stranger.files.list(after=batch.input_file_id),
        lambda: stranger.batches.retrieve(batch_id),
        lambda: stranger.batches.cancel(batch_id),
        lambda: stranger.batches.list(after=batch_id),
        lambda: stranger.batches.create(
            input_file_id=batch.input_file_id,
            endpoint="/v1/completions",
            completion_window="24h",
        ),
    ]
    for call in refused:
        with pytest.raises(openai.NotFoundError):
            call()
    assert list(stranger.files.list()) == [] and list(stranger.batches.list()) == []
    assert batch_id in [found.id for found in keyed_client.batches.list(limit=3)]
    assert keyed_client.files.retrieve(batch.input_file_id)
