"""`headway launch`: what each agent is given, and that nothing a user wrote is lost."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headway.cli.agents import AGENTS, AgentTarget, parse_settings
from headway.cli.launch import BACKUP, REPLACED
from headway.cli.main import main
from headway.core.errors import UsageError
from in_process import InProcess

OFFLINE = "http://127.0.0.1:9"


@pytest.fixture
def agents_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CODEX_HOME", "CLAUDE_CONFIG_DIR", "XDG_CONFIG_HOME", "HEADWAY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


FILES = {
    "codex": ".codex/headway.config.toml",
    "claude": ".claude/settings.json",
    "opencode": ".config/opencode/opencode.json",
}


def launch(*arguments: str) -> int:
    return main(["launch", *arguments])


def uncommented(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if not line.startswith("#"))


def test_each_agent_gets_url_model_and_key_of_a_live_server(
    agents_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    live = InProcess(tmp_path / "data", api_key=["sesame"])
    try:
        for name in AGENTS:
            assert launch(name, f"--url={live.url}/v1", "--api-key=sesame") == 0
            text = capsys.readouterr().out
            assert "sesame" not in text, "what is printed may be shown to others"
            assert FILES[name] in text
            content = tomllib.loads(text) if name == "codex" else json.loads(uncommented(text))
            check(name, content, live.url)
        assert not (agents_home / ".codex").exists()
        assert launch("codex", f"--url={live.url}", "--api-key=wrong") == 1
        assert "401" in capsys.readouterr().err
        assert launch("codex", f"--url={live.url}", "--api-key=sesame", "--model=gpt") == 2
        assert "It serves tiny" in capsys.readouterr().err
    finally:
        live.close()


def check(name: str, content: dict, url: str) -> None:
    """The fields each agent reads."""
    if name == "codex":
        assert (content["model"], content["model_provider"]) == ("tiny", "headway")
        assert content["model_context_window"] == 512
        assert content["web_search"] == "disabled"  # the server runs no tools, and refuses it
        provider = content["model_providers"]["headway"]
        assert provider["base_url"] == f"{url}/v1" and provider["wire_api"] == "responses"
        assert provider["env_key"] == "HEADWAY_API_KEY"
    elif name == "claude":
        env = content["env"]
        assert env["ANTHROPIC_BASE_URL"] == url
        assert env["ANTHROPIC_AUTH_TOKEN"] == "$HEADWAY_API_KEY"
        assert {v for k, v in env.items() if k.endswith("_MODEL")} == {"tiny"}
        assert env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "512"
        assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "512"
        assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "128"
    else:
        provider = content["provider"]["headway"]
        assert provider["options"]["baseURL"] == f"{url}/v1"
        assert provider["options"]["apiKey"] == "{env:HEADWAY_API_KEY}"
        assert provider["models"]["tiny"]["limit"] == {"context": 512, "output": 128}


AGENT = """#!{python}
import json, os, sys
json.dump([sys.argv[1:], dict(os.environ)], open({told!r}, "w"))
sys.exit(7)
"""


@pytest.mark.parametrize("name", list(AGENTS))
def test_run_starts_the_agent_set_up_and_writes_no_file(agents_home: Path, tmp_path: Path, name):
    """The program in PATH gets our arguments before its own, and its exit status is ours."""
    programs, told = tmp_path / "bin", tmp_path / "told.json"
    programs.mkdir()
    (programs / name).write_text(AGENT.format(python=sys.executable, told=str(told)))
    (programs / name).chmod(0o755)
    live = InProcess(tmp_path / "data", api_key=["sesame"])
    try:
        command = [sys.executable, "-m", "headway.cli.main", "launch", name, f"--url={live.url}"]
        done = subprocess.run(
            [*command, "--run", "--", "exec", "--help"],
            env={
                **os.environ,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "HEADWAY_API_KEY": "sesame",
                "ANTHROPIC_API_KEY": "of somebody else",
            },
        )
    finally:
        live.close()
    assert done.returncode == 7, "the agent's own"
    arguments, environment = json.loads(told.read_text())
    assert arguments[-2:] == ["exec", "--help"]
    assert "sesame" not in " ".join(arguments), "everybody may read arguments"
    assert not any((agents_home / path).exists() for path in FILES.values())
    ours = arguments[:-2]
    if name == "codex":
        content = tomllib.loads("\n".join(ours[1::2]))
        assert ours[::2] == ["-c"] * (len(ours) // 2)
        assert environment["HEADWAY_API_KEY"] == "sesame"
    elif name == "claude":
        assert ours[0] == "--settings" and "ANTHROPIC_API_KEY" not in environment
        settings = json.loads(ours[1])["env"]
        assert settings.items() <= environment.items()
        assert environment["ANTHROPIC_AUTH_TOKEN"] == "sesame"
        content = {"env": {**settings, "ANTHROPIC_AUTH_TOKEN": "$HEADWAY_API_KEY"}}
    else:
        content = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
        assert ours == [] and content["model"] == "headway/tiny"
    check(name, content, live.url)


def test_an_agent_that_is_not_installed_is_an_error(
    agents_home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch("opencode", "--run", f"--url={OFFLINE}", "--model=m") == 1
    told = capsys.readouterr().err
    assert "opencode is not installed" in told and "npm install --global opencode-ai" in told
    assert launch("codex", f"--url={OFFLINE}", "--model=m", "--", "exec") == 2
    assert "--run" in capsys.readouterr().err


@pytest.mark.parametrize("name", list(AGENTS))
def test_written_and_restored_where_there_was_nothing(
    agents_home: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    path = agents_home / FILES[name]
    for _ in range(2):
        assert launch(name, "--write", f"--url={OFFLINE}", "--model=m") == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert "m" in path.read_text() and path.name in capsys.readouterr().out
    assert launch(name, "--restore") == 0
    assert not path.exists()
    assert [p.name for p in path.parent.iterdir()] == [path.name + REPLACED]
    assert launch(name, "--restore") == 2
    assert "no backup" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["claude", "opencode"])
def test_the_old_file_is_saved_and_restored(agents_home: Path, name: str):
    path = agents_home / FILES[name]
    path.parent.mkdir(parents=True)
    before = '{"theme": "ü",   "env": {"A": "b"}, "provider": {"other": {"x": 1}}}'
    path.write_text(before)
    path.chmod(0o640)
    for model in ("first", "second"):
        assert launch(name, "--write", f"--url={OFFLINE}", f"--model={model}", "--api-key=k") == 0
    content = json.loads(path.read_text())
    assert content["theme"] == "ü" and content["env"]["A"] == "b"
    assert content["provider"]["other"] == {"x": 1}
    assert "second" in path.read_text() and path.stat().st_mode & 0o777 == 0o640
    if name == "claude":
        assert content["env"]["ANTHROPIC_AUTH_TOKEN"] == "k"
    assert path.with_name(path.name + BACKUP).read_text() == before
    assert launch(name, "--restore") == 0
    assert path.read_text() == before
    assert "second" in path.with_name(path.name + REPLACED).read_text()
    assert not path.with_name(path.name + BACKUP).exists()


def test_a_link_to_a_dotfile_stays_a_link(agents_home: Path):
    real = agents_home / "dotfiles" / "claude.json"
    real.parent.mkdir()
    real.write_text("{}")
    link = agents_home / FILES["claude"]
    link.parent.mkdir()
    link.symlink_to(real)
    assert launch("claude", "--write", f"--url={OFFLINE}", "--model=m") == 0
    assert link.is_symlink() and "ANTHROPIC_MODEL" in real.read_text()
    assert launch("claude", "--restore") == 0
    assert link.is_symlink() and real.read_text() == "{}"


@pytest.mark.parametrize("text", ['{"a": 1} // note', "[]", "{", '{"env": 5, "provider": 5}'])
def test_a_configuration_we_cannot_merge_is_left_alone(
    agents_home: Path, text: str, capsys: pytest.CaptureFixture[str]
):
    for name in ("claude", "opencode"):
        path = agents_home / FILES[name]
        path.parent.mkdir(parents=True)
        path.write_text(text)
        assert launch(name, "--write", f"--url={OFFLINE}", "--model=m") == 2
        assert path.read_text() == text and len(list(path.parent.iterdir())) == 1
        assert capsys.readouterr().out == ""


def test_names_are_quoted():
    """A model's name may hold quotes and brackets: it stays a string."""
    target = AgentTarget(base="http://h", model='a"]\n[x]\nb="\\', key="none", context=None)
    for name, agent in AGENTS.items():
        text = agent.merge(target, "")
        content = tomllib.loads(text) if name == "codex" else json.loads(text)
        assert target.model in json.dumps(content, ensure_ascii=False).replace(
            json.dumps(target.model)[1:-1], target.model
        )
    with pytest.raises(UsageError):
        parse_settings("{'a': 1}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "codex, claude, opencode"),
        (("emacs",), "codex, claude, opencode"),
        (("codex", "--url=ftp://x"), "not a URL"),
        (("codex", f"--url={OFFLINE}"), "--model"),
    ],
)
def test_a_wrong_command_is_an_error(
    agents_home: Path,
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
):
    assert launch(*arguments) in (1, 2)
    told = capsys.readouterr()
    assert words in told.err and told.out == ""
