"""Words without a value: a verb honours its switches, or refuses them by name."""

import shutil
from pathlib import Path

import pytest

from headway.cli.main import CHAT, DRY_RUN, RAW, VERBS, YES, main
from headway.spec.embedded import EMBEDDED, model_folder

POOLS = ["--prefill-replicas=1", "--decode-replicas=1"]
CLI = Path(main.__code__.co_filename).parent


def test_a_verb_takes_the_switches_that_its_module_reads():
    faults = []
    for name, verb in VERBS.items():
        module = CLI / (verb.function.partition(":")[0].rpartition(".")[2] + ".py")
        source = module.read_text()
        for switch in (DRY_RUN, CHAT, RAW):
            reads = any(f'"{switch}" {word} call.switches' in source for word in ("in", "not in"))
            if (switch in verb.switches) != (reads and (switch == DRY_RUN or name == "run")):
                faults.append(
                    f"{name} {switch}: {'read' if reads else 'not read'} by {module.name}"
                )
        if (YES in verb.switches) != ("obtain_model(" in source):
            faults.append(f"{name} {YES}")
    assert faults == []


def test_what_would_write_a_key_is_refused_beside_dry_run(tmp_path, capsys):
    file = tmp_path / "keys.yaml"
    assert main(["key", "alice", f"--file={file}", "--dry-run"]) == 2
    assert "headway key has no --dry-run" in capsys.readouterr().err
    assert not file.exists()


def test_help_shows_the_switches_of_a_verb(capsys):
    shown = {}
    for name in ("run", "serve", "plan"):
        assert main([name, "--help"]) == 0
        shown[name] = capsys.readouterr().out
    assert "  --chat " in shown["run"] and "  --dry-run " in shown["run"]
    assert "  --dry-run " in shown["serve"] and "  --chat " not in shown["serve"]
    assert "  --dry-run " not in shown["plan"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            ["--num-speculative-tokens=4", "--speculative-method=off"],
            "--num-speculative-tokens 4: with --speculative-method off",
        ),
        (["--num-speculative-tokens=4", "--speculative-method=ngram"], ""),
        ([*POOLS, "--tensor-parallel-size=3"], "--tensor-parallel-size 3: engines for prompts"),
        ([*POOLS, "--decode-context-parallel-size=2"], "--decode-context-parallel-size 2: engines"),
        ([*POOLS, "--no-prefix-cache"], "--no-prefix-cache: engines for prompts"),
        (["--replicas=2", "--kv-disk=1GB"], "--kv-disk 1GB: 2 engines cannot share the folder"),
        ([*POOLS, "--kv-disk=1GB"], "--kv-disk 1GB: 2 engines cannot share the folder"),
        ([*POOLS, "--executor=null"], "--executor null: engines for prompts"),
        (POOLS, ""),
    ],
)
def test_what_would_be_without_effect_is_refused_by_a_dry_run(words, named, capsys):
    assert main(["serve", "--dry-run", "--kv-memory=8MiB", *words]) == (2 if named else 0)
    assert named in capsys.readouterr().err


def test_a_dry_run_compiles_the_chat_template(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(model_folder(EMBEDDED), folder)
    assert main(["serve", str(folder), "--dry-run"]) == 0
    assert "chat_template          compiles" in capsys.readouterr().out
    (folder / "chat_template.jinja").write_text("{% everything %}")
    for verb in (["serve", str(folder)], ["run", str(folder), "hi"], ["chat", str(folder)]):
        assert main([*verb, "--dry-run"]) == 3
        assert "chat template does not compile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pytorch_model.bin", "is a pickle and is never opened"),
        ("model.safetensors", "less than a header"),
        ("", "holds no *.safetensors"),
    ],
)
def test_unreadable_weights_are_an_error_before_an_engine_starts(
    tmp_path, capsys, monkeypatch, name, told
):
    folder = tmp_path / "model"
    shutil.copytree(model_folder(EMBEDDED), folder)
    (folder / "model.safetensors").unlink()
    if name:
        (folder / name).write_bytes(b"\x80\x04.")
    monkeypatch.setattr("headway.cli.build_server.make_model", None)
    assert main(["serve", str(folder), "--port=0"]) == 3
    assert told in capsys.readouterr().err
