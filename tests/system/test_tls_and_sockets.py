"""HTTPS with the official client, a Unix socket with httpx, and what of both cannot be meant."""

import contextlib
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from live_server import NO_TORCH, PATIENCE_S, clean_environment, headway, wait_until


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for 127.0.0.1, its key, and the key of another."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    for name in ("a", "b"):
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        )
        command += f" -keyout {name}.key -out {name}.pem -subj /CN=localhost"
        names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder


@contextlib.contextmanager
def process(folder: Path, *arguments: str | Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A server or gateway that has greeted; its words are in `out` and `err` of `folder`."""
    folder.mkdir(exist_ok=True)
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        started = subprocess.Popen(
            [sys.executable, "-m", "headway.cli.main", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=clean_environment() | {"HEADWAY_DATA_DIR": str(folder / "data")},
        )

    def greeted() -> bool:
        assert started.poll() is None, (folder / "err").read_text()
        return "is ready: " in (folder / "out").read_text()

    try:
        wait_until(greeted)
        yield started
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
            assert started.wait(PATIENCE_S) == 0


def url_of(folder: Path) -> str:
    """Where the greeting says that it listens."""
    return (folder / "out").read_text().partition("is ready: ")[2].split()[0]


def test_the_official_client_over_tls(tiny_model: Path, certificates: Path, tmp_path: Path) -> None:
    """A server over TLS, and a gateway over TLS before it; plain HTTP gets no answer."""
    pair = [f"--ssl-certfile={certificates}/a.pem", f"--ssl-keyfile={certificates}/a.key"]
    server, gateway = tmp_path / "server", tmp_path / "gateway"
    context = ssl.create_default_context(cafile=certificates / "a.pem")
    flags = ["--port=0", "--kv-memory=64MiB", NO_TORCH]
    with process(server, "serve", tiny_model, *flags, *pair):
        assert url_of(server).startswith("https://127.0.0.1:")
        check_client(url_of(server), context)
        with pytest.raises(httpx.TransportError):
            httpx.get(url_of(server).replace("https", "http") + "/models")
    plain = tmp_path / "plain"
    with (
        process(plain, "serve", tiny_model, *flags),
        process(gateway, "gateway", "--port=0", f"--upstream={url_of(plain)}", *pair),
    ):
        assert url_of(gateway).startswith("https://127.0.0.1:")
        check_client(url_of(gateway), context)


def test_a_handshake_that_does_not_begin_counts(certificates: Path, tmp_path: Path) -> None:
    """Of connections that say nothing an address has as many as of others, for ten seconds."""
    pair = [f"--ssl-certfile={certificates}/a.pem", f"--ssl-keyfile={certificates}/a.key"]
    flags = ["--port=0", "--upstream=http://127.0.0.1:9/v1", "--max-connections=20"]
    with process(tmp_path / "g", "gateway", *flags, *pair), contextlib.ExitStack() as opened:
        url = httpx.URL(url_of(tmp_path / "g"))
        place = (url.host, url.port or 443)
        silent = [opened.enter_context(socket.create_connection(place)) for _ in range(40)]
        wait_until(lambda: sum(map(is_open, silent)) <= 10, 5)
        assert sum(map(is_open, silent)) == 10
        wait_until(lambda: not any(map(is_open, silent)), 30)
        context = ssl.create_default_context(cafile=certificates / "a.pem")
        with httpx.Client(verify=context) as http:
            assert http.get(url.copy_with(path="/health")).status_code == 200


def is_open(connection: socket.socket) -> bool:
    """Whether its other end has neither closed nor reset it."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def check_client(url: str, context: ssl.SSLContext) -> None:
    """A whole answer and a stream, the certificate verified."""
    with (
        httpx.Client(verify=context) as http,
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client,
    ):
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt=[5], max_tokens=3)
        assert whole.usage is not None and whole.usage.completion_tokens == 3
        stream = client.completions.create(model=model, prompt=[5], max_tokens=3, stream=True)
        assert [part.choices[0].finish_reason for part in stream][-1] == "length"


def test_a_unix_socket_is_served_replaced_and_removed(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    flags = ["--kv-memory=64MiB", NO_TORCH, f"--uds={path}"]
    with process(tmp_path / "server", "serve", tiny_model, *flags) as live:
        assert url_of(tmp_path / "server") == f"unix:{path}"
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://headway", timeout=60
        ) as http:
            body = {"prompt": [5], "max_tokens": 3}
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        second = headway("serve", tiny_model, *flags)
        assert second.returncode == 4 and f"The socket {path} is in use." in second.stderr
        assert path.exists() and live.poll() is None
    assert not path.exists()


def test_a_gateway_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        process(tmp_path / "g", "gateway", "--upstream=http://127.0.0.1:9/v1", f"--uds={path}"),
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as http,
    ):
        assert http.get("http://any/health").status_code == 200
    assert not path.exists()


@pytest.mark.parametrize("verb", ["serve", "gateway"])
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-certfile={}/a.pem"], ["--ssl-certfile", "without --ssl-keyfile"]),
        (["--ssl-keyfile={}/a.key"], ["--ssl-keyfile", "without --ssl-certfile"]),
        (["--ssl-certfile={}/no.pem", "--ssl-keyfile={}/a.key"], ["no.pem: No such file"]),
        (["--ssl-certfile={}/a.pem", "--ssl-keyfile={}/b.key"], ["b.key is not the key of"]),
        (["--ssl-certfile={}/a.key", "--ssl-keyfile={}/a.key"], ["cannot be read as PEM"]),
        (["--uds={}/s", "--port=1"], ["--uds", "together with --port"]),
        (["--uds={}/s", "--host=0.0.0.0"], ["--uds", "together with --host"]),
        (["--uds={}/a.pem"], ["a.pem is a file, and no socket"]),
        (["--uds={}/nowhere/s"], ["Cannot listen on --uds", "No such file"]),
    ],
)
def test_what_cannot_be_meant_is_told(
    verb: str, flags: list[str], words: list[str], certificates: Path
) -> None:
    what = ["--upstream=http://127.0.0.1:9/v1"] if verb == "gateway" else []
    done = headway(verb, *what, *(flag.format(certificates) for flag in flags))
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert len(done.stderr.splitlines()) == 2 and (certificates / "a.pem").exists()
