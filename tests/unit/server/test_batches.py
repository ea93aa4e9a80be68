"""Files and batches through the official client: their life, their results, their owners."""

import asyncio
import contextlib
import io
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import openai
import pytest

from batch_calls import begin, chat_line, ended, jsonl, line, results, upload, wait_until
from headway.core.errors import RequestError
from headway.server.files.store import File, new_id
from in_process import InProcess

KEYS = ("key-one", "key-two")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A server with two keys, small files and a small quota."""
    folder = tmp_path_factory.mktemp("state") / "data"
    live = InProcess(folder, api_key=list(KEYS), max_file=200_000, file_quota=1_000_000)
    try:
        yield live
    finally:
        live.close()


@pytest.fixture
def keyed_client(keyed: InProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key=KEYS[0], max_retries=0) as opened:
        yield opened


@pytest.fixture
def stranger(keyed: InProcess) -> Iterator[openai.OpenAI]:
    """Somebody with another key."""
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key=KEYS[1], max_retries=0) as opened:
        yield opened


# ── files ───────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_uploaded_listed_read_and_deleted(keyed_client: openai.OpenAI) -> None:
    data = bytes(range(256)) * 300
    file = keyed_client.files.create(
        file=("../ü b\r\n.jsonl", data),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.object, file.purpose) == (len(data), "file", "user_data")
    assert "/" not in file.filename and file.filename.endswith(".jsonl")
    assert file.expires_at == file.created_at + 3600 and file.status == "processed"
    assert keyed_client.files.retrieve(file.id) == file
    assert keyed_client.files.wait_for_processing(file.id) == file
    answer = keyed_client.files.content(file.id)
    assert answer.read() == data
    assert answer.response.headers["content-disposition"].startswith("attachment")
    assert file in list(keyed_client.files.list(purpose="user_data"))
    assert file not in list(keyed_client.files.list(purpose="batch"))
    gone = keyed_client.files.delete(file.id)
    assert gone.deleted and gone.id == file.id
    with pytest.raises(openai.NotFoundError) as caught:
        keyed_client.files.retrieve(file.id)
    assert caught.value.code == "file_not_found"


def test_lists_come_in_pages(keyed_client: openai.OpenAI) -> None:
    made = [upload(keyed_client, b"{}\n", f"{i}.jsonl") for i in range(5)]
    page = keyed_client.files.list(limit=2, purpose="batch")
    assert page.has_more and len(page.data) == 2
    newest_first = [file.id for file in keyed_client.files.list(limit=2, purpose="batch")]
    oldest_first = [file.id for file in keyed_client.files.list(limit=2, order="asc")]
    assert set(made) <= set(newest_first) and len(set(newest_first)) == len(newest_first)
    assert [name for name in oldest_first if name in newest_first] == newest_first[::-1]
    for name in made:
        keyed_client.files.delete(name)


@pytest.mark.parametrize(
    ("call", "status", "param", "code"),
    [
        (lambda c: c.files.create(file=b"x", purpose="other"), 400, "purpose", "invalid_value"),
        (
            lambda c: c.files.create(file=b"x" * 200_001, purpose="batch"),
            413,
            "file",
            "request_too_large",
        ),
        (
            lambda c: c.files.create(
                file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
            ),
            400,
            "expires_after.seconds",
            "invalid_value",
        ),
        (lambda c: c.files.list(limit=0), 400, "limit", "invalid_value"),
        (lambda c: c.files.list(after="file-1"), 404, "file_id", "file_not_found"),
        (lambda c: c.files.delete("file-1"), 404, "file_id", "file_not_found"),
        (lambda c: c.batches.list(limit=101), 400, "limit", "invalid_value"),
        (lambda c: c.batches.retrieve("batch_1"), 404, "batch_id", "batch_not_found"),
        (lambda c: c.batches.cancel("batch_1"), 404, "batch_id", "batch_not_found"),
    ],
)
def test_a_refusal_names_the_field(
    keyed_client: openai.OpenAI, call: Callable[..., Any], status: int, param: str, code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        call(keyed_client)
    error = caught.value
    assert (error.status_code, error.param, error.code) == (status, param, code)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/plain", b"x"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"x" * 20_000),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\n\r\nx\r\n--b--"),
        ("multipart/form-data; boundary=b", b"--b\r\n" + b"a: b\r\n" * 5000),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nx',
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n'
            + b"x" * 2000
            + b"\r\n--b--",
        ),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--',
        ),
    ],
)
def test_a_form_that_is_none_is_refused(keyed: InProcess, kind: str, body: bytes) -> None:
    request = urllib.request.Request(
        keyed.url + "/v1/files",
        data=body,
        headers={"content-type": kind, "authorization": f"Bearer {KEYS[0]}"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as error:
        assert error.code == 400 and json.loads(error.read())["error"]["code"]


def test_nothing_is_kept_of_what_was_refused(keyed: InProcess, keyed_client: openai.OpenAI) -> None:
    kept = {file.id for client in KEYS for file in client_of(keyed, client).files.list()}
    on_disk = {path.name for path in (keyed.data / "files").iterdir()}
    assert on_disk == kept


def client_of(live: InProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=live.url + "/v1", api_key=key, max_retries=0)


def test_a_key_has_a_quota(keyed: InProcess, stranger: openai.OpenAI) -> None:
    made = [upload(stranger, b"x" * 190_000) for _ in range(5)]
    with pytest.raises(openai.APIStatusError) as caught:
        upload(stranger, b"x" * 190_000)
    assert caught.value.status_code == 413 and caught.value.code == "file_quota_exceeded"
    for name in made:
        stranger.files.delete(name)
    stranger.files.delete(upload(stranger, b"x" * 190_000))


def test_uploads_at_once_share_the_quota(keyed: InProcess, stranger: openai.OpenAI) -> None:
    """Ten uploads of 190 kB, each waiting for the others before its last byte, and 1 MB for all.

    Those that are refused, and one whose client leaves, give back what they had reserved.
    """
    socks = [open_upload(keyed, b"x" * 190_000) for _ in range(10)]
    gone = open_upload(keyed, b"x" * 90_000)
    files = keyed.runner.files
    wait_until(lambda: files.arriving["api-key-2"] > 300_000)
    time.sleep(0.3)
    assert files.arriving["api-key-2"] <= 1_000_000
    gone.close()
    statuses = [finish_upload(sock) for sock in socks]
    kept = list(stranger.files.list())
    assert set(statuses) == {200, 413}
    assert statuses.count(200) == len(kept) > 0
    assert sum(file.bytes for file in kept) <= 1_000_000
    wait_until(lambda: not files.arriving)
    for file in kept:
        stranger.files.delete(file.id)
    made = [upload(stranger, b"x" * 190_000) for _ in range(5)]
    for name in made:
        stranger.files.delete(name)


def test_a_quota_holds_for_uploads_that_end_at_once(keyed: InProcess) -> None:
    """What two uploads could both have seen as free is given once: the last word is the store's."""
    files = keyed.runner.files
    file = File(id=new_id("file-"), bytes=600_000, created_at=0, filename="x", purpose="batch")
    again = msgspec.structs.replace(file, id=new_id("file-"))

    async def keep(each: File) -> None:
        files.path(each.id + ".part").write_bytes(b"")
        await files.add(each, "somebody", files.path(each.id + ".part"), 1_000_000)

    asyncio.run_coroutine_threadsafe(keep(file), keyed.loop).result(60)
    with pytest.raises(RequestError, match="for one key"):
        asyncio.run_coroutine_threadsafe(keep(again), keyed.loop).result(60)
    files.path(again.id + ".part").unlink()
    asyncio.run_coroutine_threadsafe(files.delete(file.id, "somebody"), keyed.loop).result(60)


BOUNDARY = b"--b\r\n"
FIELDS = (
    BOUNDARY + b'content-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    + BOUNDARY + b'content-disposition: form-data; name="file"; filename="x"\r\n\r\n'
)  # fmt: skip
END = b"\r\n--b--\r\n"


def open_upload(live: InProcess, data: bytes) -> socket.socket:
    """An upload of the second key, all of it sent but its end."""
    host, _, port = live.url.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)), timeout=60)
    length = len(FIELDS) + len(data) + len(END)
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEYS[1]}\r\n"
        f"content-type: multipart/form-data; boundary=b\r\ncontent-length: {length}\r\n\r\n"
    )
    sock.sendall(head.encode() + FIELDS + data)
    return sock


def finish_upload(sock: socket.socket) -> int:
    """Send the end, where somebody still reads it; the status."""
    with sock:
        with contextlib.suppress(OSError):
            sock.sendall(END)
        return int(sock.makefile("rb").readline().split()[1])


@pytest.mark.parametrize(
    "name",
    [
        "../headway.db",
        "..%2fheadway.db",
        "%2e%2e%2fheadway.db",
        "....//headway.db",
        "%2fetc%2fpasswd",
        "file-%00",
        "*",
        "' OR 1=1 --",
        "x" * 3000,
    ],
)
def test_no_path_leads_out_of_the_folder(keyed: InProcess, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        status, body = raw_get(keyed, path)
        assert status in (400, 404), (path, status)
        assert b"SQLite" not in body and b"root:" not in body


def raw_get(live: InProcess, path: str) -> tuple[int, bytes]:
    """GET without a client that tidies the path."""
    import http.client
    from urllib.parse import quote

    host = live.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.putrequest("GET", quote(path, safe="/%*'=.-"), skip_host=False)
        connection.putheader("authorization", f"Bearer {KEYS[0]}")
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


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
