"""The gateway's file: every error names the row, the field and the fix."""

from pathlib import Path

import pytest

from headway.cli.main import main
from headway.core.errors import UsageError
from headway.gateway.config import ANY, config_of_urls, key_of, read_config

GOOD = """
upstreams:
  - {name: a, url: http://10.0.0.1:8000/v1, price: {input: 1, cached: 0.1, output: 4}}
  - {name: b, url: http://10.0.0.2:8000/v1, kind: vllm, price: {hour: 2.5}, context: 8192}
models:
  - {name: chat, upstreams: [a, b], policy: least, fallbacks: [big], deadline: 120s}
  - {name: big, upstreams: [b], first_token: 500ms, resume: text}
budgets:
  alice: {dollars: 5, per: month}
forward_headers: [X-Tenant]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(text)
    return path


def test_a_file_is_rows(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, GOOD))
    assert [row.name for row in config.upstreams] == ["a", "b"]
    chat, big = config.models
    assert (chat.deadline_s, big.first_token_s, big.resume) == (120.0, 0.5, "text")
    assert config.budgets["alice"].per == "month"
    assert config.forward_headers == ("x-tenant",) and config.warnings == ()


@pytest.mark.parametrize(
    ("before", "after", "named", "fix"),
    [
        ("upstreams:", "upstream:", "upstreams", ""),
        ("models:", "modles:", "modles", "Did you mean models?"),
        ("price: {input: 1", "price: {inptu: 1", "a: ", "Did you mean input?"),
        ("kind: vllm", "kind: vlm", "b: Invalid enum value 'vlm'", "Did you mean vllm?"),
        ("kind: vllm", "kind: litellm", "value 'litellm'", "openai, anthropic, azure, bedrock."),
        ("kind: vllm", "kind: azure, model: m", "b: kind azure needs api_version", ""),
        ("kind: vllm", "kind: bedrock", "b: kind bedrock needs model", ""),
        ("kind: vllm", "kind: vllm, api_version: v", "b: api_version is a field of kind azure", ""),
        ("X-Tenant", "api-key", "api-key is never passed on", ""),
        ("name: a, url: http://10.0.0.1:8000/v1", "name: a", "a: url '' is no address", ""),
        ("policy: least", "polcy: least", "chat: ", "Did you mean policy?"),
        ("policy: least", "policy: last", "chat: ", ""),
        ("upstreams: [a, b]", "upstreams: [a, c]", "chat: upstreams names 'c'", "a, b"),
        ("fallbacks: [big]", "fallbacks: [bigg]", "chat: fallbacks", "Did you mean big?"),
        ("fallbacks: [big]", "fallbacks: [chat]", "go round: chat → chat", ""),
        ("name: b,", "name: a,", "'a' is there twice", ""),
        ("name: big,", "name: chat,", "'chat' is there twice", ""),
        ("http://10.0.0.1:8000/v1", "10.0.0.1:8000", "a: url '10.0.0.1:8000' is no address", ""),
        ("http://10.0.0.1", "http://me:secret@10.0.0.1", "is no address", ""),
        ("http://10.0.0.1", "dns+https://a", "a: url: dns+https cannot be", ""),
        ("deadline: 120s", "deadline: 120", "chat: ", ""),
        ("{hour: 2.5}", "{hour: 2.5, input: 1}", "b: price has an hour and tokens", ""),
        ("{hour: 2.5}", "{hour: -1}", "price.hour must be between", ""),
        ("context: 8192", "context: -1", "b: context must be between", ""),
        ("dollars: 5", "dolars: 5", "alice", "Did you mean dollars?"),
        ("per: month", "per: year", "alice", ""),
        ("X-Tenant", "Authorization", "authorization is never passed on", ""),
    ],
)
def test_a_fault_is_named(tmp_path: Path, before: str, after: str, named: str, fix: str) -> None:
    assert before in GOOD
    with pytest.raises(UsageError) as raised:
        read_config(written(tmp_path, GOOD.replace(before, after, 1)))
    assert named in raised.value.cause and raised.value.fix
    assert fix in raised.value.fix
    assert str(tmp_path) in raised.value.cause


def test_a_budget_over_what_is_free_is_warned_of(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, GOOD.replace(", price: {hour: 2.5}", "")))
    assert ["b has no price" in warning for warning in config.warnings] == [True]


def test_the_example_of_hosted_providers_is_a_file_of_the_gateway() -> None:
    config = read_config(Path(__file__).parents[3] / "deploy" / "gateway" / "hosted.yaml")
    kinds = {row.kind: row.address for row in config.upstreams}
    assert {"openai", "anthropic", "azure", "bedrock"} <= kinds.keys()
    assert kinds["anthropic"] == "https://api.anthropic.com/v1"


def test_replicas_need_no_file() -> None:
    config = config_of_urls(["http://a:8000/v1", "http://b:8000/v1"])
    (model,) = config.models
    assert model.name == ANY and model.upstreams == ("a:8000", "b:8000")
    with pytest.raises(UsageError, match="no address"):
        config_of_urls(["a:8000"])


def test_a_key_is_in_the_environment_or_in_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(**fields: str) -> str:
        extra = "".join(f", {name}: {value}" for name, value in fields.items())
        text = f"upstreams:\n  - {{name: a, url: http://a:1/v1{extra}}}\n"
        return key_of(read_config(written(tmp_path, text)).upstreams[0])

    monkeypatch.setenv("KEY_OF_A", "secret")
    assert row(key_env="KEY_OF_A") == "secret" and row() == ""
    secret = tmp_path / "key"
    secret.write_text("other\n")
    secret.chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others"):
        row(key_file=str(secret))
    secret.chmod(0o600)
    assert row(key_file=str(secret)) == "other"
    with pytest.raises(UsageError, match="not set"):
        row(key_env="NOT_THERE")
    with pytest.raises(UsageError, match="keep one"):
        row(key_env="KEY_OF_A", key_file=str(secret))


def test_the_dry_run_prints_the_routes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.yaml"
    assert main(["key", "alice", f"--file={keys}"]) == 0
    file = str(written(tmp_path, GOOD))
    assert main(["gateway", file, "--dry-run", f"--key-file={keys}"]) == 0
    shown = capsys.readouterr().out
    assert "chat" in shown and "a, b; then big" in shown and "$5.00 per month" in shown


@pytest.mark.parametrize(
    "words", [["a.yaml", "b.yaml"], ["a.yaml", "--upstream=http://a:1/v1"], [], ["nowhere.yaml"]]
)
def test_what_it_is_started_with_is_checked(words: list[str]) -> None:
    assert main(["gateway", *words]) == 2
