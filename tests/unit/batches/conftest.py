"""A server with two keys, and clients of each."""

from collections.abc import Iterator

import openai
import pytest

from batch_calls import KEYS
from in_process import InProcess


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
