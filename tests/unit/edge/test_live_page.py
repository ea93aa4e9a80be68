"""Files of a page: one address each, a digest that saves a download, nothing beside them."""

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from headway.edge import page
from headway.gateway import page as of_gateway
from headway.server import page as of_server


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """A page of one file of its own beside those that all share."""
    (tmp_path / "index.html").write_text("<p>Hello</p>")
    (tmp_path / "notes.txt").write_text("not of the page")
    (tmp_path / "own.js").write_text("export const own = 1;")
    routes = [Route(path, answer) for path, answer in page.endpoints(tmp_path).items()]
    return TestClient(Starlette(routes=routes))


def test_each_file_has_its_address_and_type(client: TestClient) -> None:
    for path, kind in (
        ("/", "text/html; charset=utf-8"),
        ("/page/own.js", "text/javascript; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ):
        answer = client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"] == kind
        for name, value in page.HEADERS.items():
            assert answer.headers[name] == value
    assert client.get("/page/notes.txt").status_code == 404
    assert client.get("/page/__init__.py").status_code == 404


def test_a_file_that_a_browser_has_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/own.js")
    again = client.get("/page/own.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/page/own.js", headers={"if-none-match": '"another"'})
    assert other.content == first.content == b"export const own = 1;"


def test_both_pages_have_what_they_share_and_an_index_of_their_own() -> None:
    shared = {"/page/page.css", "/page/dom.js", "/page/format.js", "/page/talk.js"}
    assert shared | {"/"} <= of_server.PATHS & of_gateway.PATHS
    assert "/page/gateway.js" in of_gateway.PATHS - of_server.PATHS
    assert "/page/main.js" in of_server.PATHS - of_gateway.PATHS
    indexes = [
        next(file for file in files if file.name == "index.html")
        for files in (of_server.FILES, of_gateway.FILES)
    ]
    assert indexes[0] != indexes[1]
