"""Forms of uploads: read alike however they are split; names of files; faults that are told."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.batches.files.multipart import Begun, Multipart, Piece, begun, boundary
from headway.batches.files.routes import plain_name
from headway.core.errors import RequestError


def form(boundary: str, parts: list[tuple[str, str | None, bytes]]) -> bytes:
    data = b""
    for name, filename, content in parts:
        more = "" if filename is None else f'; filename="{filename}"'
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="{name}"{more}\r\n\r\n'
        data += head.encode() + content + b"\r\n"
    return data + f"--{boundary}--\r\n".encode()


def read_all(data: bytes, cuts: list[int], boundary: str) -> list[Any]:
    """[(name, filename, content), …] however the body is cut."""
    reader = Multipart(f'multipart/form-data; boundary="{boundary}"')
    found: list[Any] = []
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        for event in reader.feed(data[start:end]):
            if isinstance(event, Begun):
                found.append([event.name, event.filename, b""])
            else:
                assert isinstance(event, Piece)
                found[-1][2] += event.data
    assert reader.finished
    return [tuple(part) for part in found]


near_delimiters = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"--", b"\r\n--", b"\r\n--B", b"B", b"x", b"\0"])
).map(b"".join)


@given(st.lists(near_delimiters, max_size=4), st.lists(st.integers(0, 2**16), max_size=30))
def test_a_form_is_the_same_however_it_is_split(contents: list[bytes], cuts: list[int]):
    contents = [content for content in contents if b"\r\n--B" not in b"\r\n" + content]
    parts = [(f"p{i}", "f" if i % 2 else None, content) for i, content in enumerate(contents)]
    data = form("B", parts)
    assert read_all(data, cuts, "B") == parts
    assert read_all(data, list(range(len(data))), "B") == parts


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ('filename="a.jsonl"', "a.jsonl"),
        ("filename=a.jsonl;", "a.jsonl"),
        (r'filename="a \"b\" \\ c:\d"', r'a "b" \ c:\d'),
        ("filename=plain; filename*=UTF-8''%C3%A9.jsonl", "é.jsonl"),
        ("filename*=iso-8859-1'en'%E9", "é"),
        ('filename=""', ""),
    ],
)
def test_a_file_has_the_name_that_its_header_says(header: str, name: str):
    assert begun(f'Content-Disposition: form-data; name="file"; {header}'.encode()).filename == name


@pytest.mark.parametrize(
    "header",
    [
        "filename*=undefined''x",
        "filename*=idna''x",
        "filename*=utf\0-8''x",
        "filename*=utf-8''%ff",
        "filename*=x",
        "filename*0=a; filename*1=b",
        'filename="a',
        "filename=a; filename=b",
        "filename",
        ";" * 7000 + "x",
    ],
)
def test_a_name_that_cannot_be_read_is_a_clear_error(header: str):
    with pytest.raises(RequestError) as caught:
        begun(f'content-disposition: form-data; name="file"; {header}'.encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_multipart")


@pytest.mark.parametrize("header", ["", "filename=a", "name=", 'name=""', "name"])
def test_a_part_without_a_name_is_a_clear_error(header: str):
    with pytest.raises(RequestError) as caught:
        begun(f"content-disposition: form-data; {header}".encode())
    assert (caught.value.status, caught.value.code) == (400, "invalid_multipart")


@pytest.mark.parametrize("filler", [";", '"', ";a=", ';a="', "; ", ";a", "\\", "=", "a"])
def test_headers_of_any_kind_are_read_in_linear_time(filler: str):
    """60 kB of semicolons, a hundred times; the standard library's parser takes a minute."""
    text = filler * (60_000 // len(filler))
    for _ in range(100):
        for read in (boundary, lambda value: begun(b"content-disposition:" + value.encode())):
            with pytest.raises(RequestError):
                read("multipart/form-data;" + text[:60_000])
            with pytest.raises(RequestError):
                read("multipart/form-data;" + text[:8000])


def test_a_name_is_a_word():
    names = {
        "../../etc/passwd": "passwd",
        "C:\\x\\y.txt": "y.txt",
        "a\r\nb\x00\x1b.jsonl": "ab.jsonl",
        "": "upload",
        "/": "upload",
        "ü" * 999: "ü" * 255,
    }
    assert {name: plain_name(name) for name in names} == names
