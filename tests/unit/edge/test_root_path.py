"""Behind a reverse proxy: the same server below a path, whether the proxy takes the path off."""

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from batch_calls import wait_until
from headway.core.errors import UsageError
from headway.edge.root_path import check_root_path
from in_process import InProcess

KEY = {"authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    opened = InProcess(
        tmp_path_factory.mktemp("proxied"), root_path="/some/models/", api_key=["sesame"]
    )
    yield opened
    opened.close()


def get(server: InProcess, path: str, **fields: object) -> requests.Response:
    return requests.get(server.url + path, timeout=60, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", ["", "/some/models"])
def test_paths_are_served_with_and_without_it(server: InProcess, root: str) -> None:
    assert get(server, root + "/health").status_code == 200
    assert get(server, root + "/v1/models", headers=KEY).json()["data"][0]["id"] == "tiny"
    assert get(server, root + "/metrics", headers=KEY).status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = requests.post(server.url + root + "/v1/messages", json=body, headers=KEY, timeout=60)
    assert answer.json()["type"] == "message"


@pytest.mark.parametrize("root", ["", "/some/models"])
def test_results_are_below_it(server: InProcess, root: str) -> None:
    """Anthropic's client asks where `results_url` says, whether the proxy took the path off."""
    params = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    path = f"{root}/v1/messages/batches"
    made = requests.post(
        server.url + path,
        json={"requests": [{"custom_id": "a", "params": params}]},
        headers=KEY,
        timeout=60,
    )
    name = made.json()["id"]

    def over() -> Any:
        found = get(server, f"{path}/{name}", headers=KEY).json()
        return found if found["processing_status"] == "ended" else None

    url = wait_until(over)["results_url"]
    assert url == f"{server.url}/some/models/v1/messages/batches/{name}/results"
    assert requests.get(url, headers=KEY, timeout=60).json()["custom_id"] == "a"


@pytest.mark.parametrize("root", ["", "/some/models"])
def test_the_doors_see_the_path_below_it(server: InProcess, root: str) -> None:
    """Keys are asked for, and errors are in the words of the dialect."""
    assert get(server, root + "/v1/models").status_code == 401
    assert get(server, root + "/stats").status_code == 401
    refused = requests.post(server.url + root + "/v1/messages", json={}, headers=KEY, timeout=60)
    assert refused.json()["type"] == "error"


def test_the_page_finds_its_files(server: InProcess) -> None:
    page = get(server, "/some/models")
    assert page.url == server.url + "/some/models/", "its addresses are relative"
    assert page.status_code == 200 and 'src="page/main.js"' in page.text
    assert get(server, "/some/models/page/main.js").status_code == 200
    assert get(server, "/some/modelsx").status_code in (401, 404)


def test_the_document_names_it(server: InProcess) -> None:
    document = get(server, "/some/models/openapi.json", headers=KEY).json()
    assert document["servers"] == [{"url": "/some/models"}]


@pytest.mark.parametrize(
    "root", ["models", "/a b", "//", "/a/../b", "/a?b", "/%2e", "/ä", "/v1", "/v1/"]
)
def test_what_is_no_path_is_refused(root: str) -> None:
    with pytest.raises(UsageError, match="--root-path"):
        check_root_path(root)


def test_a_path_may_end_in_a_slash() -> None:
    assert (check_root_path("/a/"), check_root_path("/"), check_root_path("")) == ("/a", "", "")
