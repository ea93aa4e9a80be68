"""The recipe of the embedded models at a hundredth of its size, stage by stage, as make runs it.

The loss falls, a stopped run continues as if it had not been stopped, and the exported folders
give in transformers the logits of the model that was trained.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from recipes.tiny import medusa, train, tune
from recipes.tiny.conversations import conversations
from recipes.tiny.model import Llama, Shape
from recipes.tiny.muon import orthogonal
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from headway.compress.train import checkpoint
from headway.config.options import EngineOptions
from headway.config.speculation_config import MedusaSpec
from headway.evals.skills.structured import TOOLS, function
from headway.evals.skills.suite import DEMO, LEVELS, SKILLS, TEST_SEED, examples
from headway.frontend.text import Tokenizer
from headway.planning import plan_settings

ROOT = Path(__file__).resolve().parents[2]
STEPS = {"train": 30, "tune": 4, "distill": 30}
GIVEN_LR = 0.0015
SMALL = ("--step-tokens", 2048, "--threads", 1)
LONG = ("--step-tokens", 4096, "--threads", 1)
"""Conversations go up to 4,096 tokens."""
HEADS = ("--answers", 60, "--steps", 40, "--batch", 128, "--heads", 2, "--layers", 1)
LAYER = ("--answers", 30, "--steps", 20, "--batch", 512)
VARIED = ("--varied-conversations", 400)
TINY = Shape(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=16,
)


def stage(name: str, *arguments: object) -> None:
    command = [sys.executable, "-m", f"recipes.tiny.{name}", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every stage has run, on 1% of the text, chats and steps."""
    out, text = tmp_path_factory.mktemp("recipe"), shared / "text"
    source = ("--text", text, "--out", out)
    stage("tokenizer", *source, "--bytes-per-shard", 30_000, "--conversations", 100)
    stage("data", *source, "--bytes-per-shard", 100_000, "--conversations", 2000, *VARIED)
    stage("train", "--out", out, "--steps", STEPS["train"], *SMALL)
    settle = ("--settle-steps", STEPS["tune"])
    stage("tune", "--out", out, "--steps", STEPS["tune"], *settle, *LONG)
    stage("distill", "--out", out, "--steps", STEPS["distill"], "--first", *SMALL)
    stage("distill", "--out", out, "--steps", STEPS["tune"], "--peak-lr", GIVEN_LR, *LONG)
    for name in ("headway-tiny", "headway-draft"):
        stage("export", "--out", out, "--model", out / "models" / name)
    stage("medusa", "--model", out / "models" / "headway-tiny", *HEADS)
    stage("eagle", "--model", out / "models" / "headway-tiny", *LAYER)
    return out


def log(run: Path, name: str) -> list[dict[str, str]]:
    with (run / name / "loss.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["headway-base", "headway-draft-base"])
def test_the_loss_falls(run: Path, name: str) -> None:
    first, *_, last = log(run, name)
    for column in ("books_loss", "chats_loss"):
        assert float(last[column]) < 0.95 * float(first[column])
    assert float(last["unseen_bits_per_byte"]) < 3.5


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("headway-tuned", "headway-base"),
        ("headway-settled", "headway-tuned"),
        ("headway-draft", "headway-draft-base"),
    ],
)
def test_tuning_goes_on_from_the_first_stage(run: Path, name: str, first: str) -> None:
    """At once as good at books as it was, on longer rows, and with a record of the time it took."""
    assert float(log(run, name)[-1]["unseen_bits_per_byte"]) < 1.1 * float(
        log(run, first)[-1]["unseen_bits_per_byte"]
    )
    training = json.loads((run / name / "training.json").read_text())
    assert training["shape"]["max_position_embeddings"] == training["plan"]["long_length"] == 4096
    by_pace, wall = training["minutes"]
    assert by_pace > 0 and wall > 0


@pytest.mark.parametrize(
    ("name", "peak_lr"), [("headway-draft-base", train.PEAK_LR), ("headway-draft", GIVEN_LR)]
)
def test_a_learning_rate_that_is_given_is_the_one_used(
    run: Path, name: str, peak_lr: float
) -> None:
    training = json.loads((run / name / "training.json").read_text())
    assert training["plan"]["peak_lr"] == peak_lr


def test_the_card_names_the_teachers() -> None:
    """What `distill` loads is what the card of the draft, as it is shipped too, says."""
    from recipes.tiny.card import WHAT

    told = WHAT["headway-draft"].format(
        parameters=578_016, minutes=31, wall=41, base=train.BASE, settled=tune.SETTLED
    )
    shipped = (ROOT / "src/headway/embedded/headway-draft/README.md").read_text()
    assert told in shipped


@pytest.mark.parametrize("name", ["headway-tiny", "headway-draft"])
def test_the_export_loads_in_transformers_with_equal_logits(run: Path, name: str) -> None:
    shape = Shape(**json.loads((run / name / "training.json").read_text())["shape"])
    trained = Llama(shape)
    weights = checkpoint.weights(load_file(run / name / "checkpoint.safetensors"))
    trained.load_state_dict({k: v.bfloat16().float() for k, v in weights.items()})
    folder = run / "models" / name
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)("Once upon a time there was a fox.").input_ids
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        assert_close(trained.logits(trained(tokens)), exported(tokens).logits, atol=1e-4, rtol=1e-4)


def test_the_heads_are_served(run: Path) -> None:
    """And have learned: at first each said what the model says next, which is no guess."""
    folder = run / "models" / "headway-tiny"
    options = EngineOptions(device="cpu", speculative_method="medusa")
    found = plan_settings(folder, options)[1].speculation.medusa
    assert found == MedusaSpec(
        num_heads=2, num_layers=1, shares_head=True, num_parameters=2 * 192 * 193
    )
    tensors = load_file(folder / "medusa.safetensors")
    assert all(bool(value.any()) for value in tensors.values())
    with safe_open(folder / "medusa.safetensors", "pt") as file:
        told = file.metadata()
    assert told["answers"] == "60" and len(told["right"].split()) == 2


def test_the_layer_is_served(run: Path) -> None:
    """It has the model's sizes, its file says how often it is right, and nothing else is left."""
    folder = run / "models" / "headway-tiny"
    options = EngineOptions(device="cpu", speculative_method="auto")
    found = plan_settings(folder, options)[1].speculation.eagle
    assert found is not None
    assert (found.num_heads, found.num_kv_heads, found.intermediate_size) == (3, 1, 512)
    with safe_open(folder / "eagle.safetensors", "pt") as file:
        told = file.metadata()
    assert told["answers"] == "30" and len(told["right"].split()) == 4
    assert not folder.with_name("headway-tiny.eagle").exists()


def test_the_heads_learn_what_comes_later() -> None:
    """Behind an 8 comes 1, which the model says; head 0 says 2 and head 1 says 3."""
    found = medusa.targets([7, 8, 1, 2, 3], 2, 2)
    nothing = medusa.NOTHING
    assert found.tolist() == [[2, 3], [3, nothing], [nothing, nothing], [nothing, nothing]]


def test_the_draft_has_five_to_ten_times_fewer_flops() -> None:
    from recipes.tiny.distill import SIZES

    def num_multiplied(shape: Shape) -> int:
        return sum(p.numel() for p in Llama(shape).parameters() if p.dim() == 2)

    target, draft = Shape(vocab_size=4096), Shape(vocab_size=4096, **SIZES)
    assert 5 <= num_multiplied(target) / num_multiplied(draft) <= 10


def random_corpora(out: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in (*train.SOURCES, "val"):
        arrays = {
            "tokens": torch.randint(TINY.vocab_size, (60_000,), generator=generator).short(),
            "weights": torch.ones(60_000, dtype=torch.float16),
            "starts": torch.arange(0, 50_000, 100, dtype=torch.int32),
        }
        save_file(arrays, out / f"{name}.safetensors")


def test_a_stopped_run_continues_as_if_it_had_not_been_stopped(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "SAVE_EVERY", 2)
    monkeypatch.setattr(train, "NUM_ROWS", 1)
    monkeypatch.setattr(train, "LOG_EVERY", 1)
    (tmp_path / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    random_corpora(tmp_path)
    plan, cpu = train.Plan(steps=6), torch.device("cpu")

    def losses(model: Llama, *rows: torch.Tensor) -> list[torch.Tensor]:
        if losses.left == 0:
            raise KeyboardInterrupt
        losses.left -= 1
        return train.losses(model, *rows)

    losses.left = 6
    train.train(tmp_path, "whole", plan, TINY, cpu, losses)
    losses.left = 5
    with pytest.raises(KeyboardInterrupt):
        train.train(tmp_path, "stopped", plan, TINY, cpu, losses)
    losses.left = 2
    train.train(tmp_path, "stopped", plan, TINY, cpu, losses)
    whole, stopped = (
        load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "stopped")
    )
    assert whole.keys() == stopped.keys()
    for name, value in whole.items():
        assert_close(stopped[name], value, atol=1e-5, rtol=1e-4)
    assert [row["step"] for row in log(tmp_path, "stopped")] == list("123456")


def test_muon_makes_a_matrix_orthogonal() -> None:
    matrix = torch.randn(48, 20, generator=torch.Generator().manual_seed(0))
    singular = torch.linalg.svdvals(orthogonal(matrix))
    assert singular.min() > 0.5
    assert singular.max() < 1.3


def test_nothing_asked_in_the_tests_is_trained_on() -> None:
    asked = set(DEMO)
    for skill in SKILLS:
        for level in LEVELS:
            stream = examples(skill, level, TEST_SEED)
            asked |= {example.prompt for example, _ in zip(stream, range(20))}
            assert all(e.accepts(e.answer) for e, _ in zip(stream, range(20)))
    trained = {
        piece.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]
        for pieces, _ in zip(conversations(seed=0), range(3000))
        if len(pieces) == 4
        for piece, _ in pieces[:1]
    }
    assert len(trained) > 1000
    assert not asked & trained


def test_the_template_writes_tools_and_calls_as_they_were_trained(run: Path) -> None:
    tokenizer = Tokenizer(run / "models" / "headway-tiny")
    example = next(examples("tool", 2, 5))
    offered = [name for name in TOOLS if f'"name": "{name}"' in example.system]
    offered.sort(key=lambda name: example.system.index(f'"name": "{name}"'))
    trained = tokenizer.chat_ids(example.messages)
    tools = [function(name) for name in offered]
    assert tokenizer.chat_ids(example.messages[1:], tools=tools) == trained
    call = {"name": "get_time", "arguments": {"city": "Oslo"}}
    messages = [
        *example.messages,
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}]},
        {"role": "tool", "content": "12:00"},
    ]
    text = tokenizer.decode(tokenizer.chat_ids(messages)[len(trained) :], skip_special_tokens=False)
    assert text == (
        "<tool_call>\n" + json.dumps(call) + "\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
