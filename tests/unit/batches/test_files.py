"""Files through the official client: kept, listed, refused by the field, within a quota."""

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest

from batch_calls import KEYS, upload, wait_until
from headway.batches.files.store import File, new_id
from headway.core.errors import RequestError
from in_process import InProcess


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
        await files.used_bytes("somebody")  # opens the folder
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
