"""Medusa heads guess what their numbers say, and a file that does not fit is refused."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from drive import engine_for, finish, greedy
from headway.config.options import EngineOptions
from headway.core.errors import CheckpointError, UsageError
from headway.engine.engine import Engine
from headway.frontend.text import Tokenizer
from headway.planning import plan_settings
from headway.spec.embedded import model_folder
from parity.drafting import Proposals, some_requests

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, VOCABULARY, FILE = 192, 4096, "medusa.safetensors"


def random_heads(num_heads: int, num_layers: int, *, own: bool) -> dict[str, Tensor]:
    """Heads that say something else than the model, and each something of its own."""
    generator = torch.Generator().manual_seed(num_heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = normal(HIDDEN, HIDDEN)
            tensors[f"{head}.{layer}.linear.bias"] = normal(HIDDEN)
        if own:
            tensors[f"{head}.{num_layers}.weight"] = normal(VOCABULARY, HIDDEN)
    return tensors


def facts(num_heads: int, num_layers: int, head: str) -> dict[str, str]:
    return {
        "medusa_num_heads": str(num_heads),
        "medusa_num_layers": str(num_layers),
        "head": head,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """headway-tiny without heads."""
    path = tmp_path / "model"
    path.mkdir()
    for file in model_folder(None).iterdir():
        if file.name != FILE:
            (path / file.name).symlink_to(file)
    return path


def write(folder: Path, tensors: dict[str, Tensor], told: dict[str, str]) -> None:
    save_file(tensors, folder / FILE, metadata=told)


def asking_engine(folder: Path, **options: object) -> tuple[Engine, Proposals]:
    """An engine whose heads are asked for guesses in every step."""
    engine = engine_for(folder, speculative_method="medusa", **options)
    proposals = Proposals()
    engine.scheduler.drafts.speculator = proposals
    return engine, proposals


def said_by(
    tensors: dict[str, Tensor], num_layers: int, state_H: Tensor, output_VH: Tensor
) -> list[Tensor]:
    """The logits of each head behind one state of the model, one operation after the other."""
    found = []
    for head in range(len({name.partition(".")[0] for name in tensors})):
        x_H = state_H
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            x_H = x_H + functional.silu(tensors[f"{name}.weight"] @ x_H + tensors[f"{name}.bias"])
        found.append(tensors.get(f"{head}.{num_layers}.weight", output_VH) @ x_H)
    return found


@pytest.mark.parametrize(
    ("num_heads", "num_layers", "own", "options", "most_off"),
    [
        (3, 2, False, {"max_model_len": 256, "kernels": "torch", "dtype": "float32"}, 1e-3),
        (2, 1, True, {"max_model_len": 256, "kernels": "torch", "dtype": "float32"}, 1e-3),
        (3, 2, False, {"max_model_len": 256}, 0.6),
        (3, 1, True, {"num_blocks": 14, "max_num_batched_tokens": 24, "max_num_seqs": 4}, 0.6),
        (2, 2, False, {"max_model_len": 256, "quantization": "int4"}, None),
    ],
    ids=["shared", "own", "native", "little room", "int4"],
)
def test_heads_guess_what_their_numbers_say(
    folder: Path,
    num_heads: int,
    num_layers: int,
    own: bool,
    options: dict[str, object],
    most_off: float | None,
):
    """From the state behind which the last token was drawn, after right and wrong guesses.

    A guess may be less likely than the likeliest by `most_off` of its logit, for rounding.
    """
    tensors = random_heads(num_heads, num_layers, own=own)
    write(folder, tensors, facts(num_heads, num_layers, "own" if own else "shared"))
    engine, proposals = asking_engine(folder, **options)
    requests = some_requests(random.Random(5), 12, kernels=options.get("kernels"))
    answers = finish(engine, requests)
    alone = {name: value for name, value in options.items() if name != "num_blocks"}
    plain = finish(engine_for(model_folder(None), **alone), requests)
    assert {key: a.token_ids for key, a in answers.items()} == {
        key: a.token_ids for key, a in plain.items()
    }
    assert proposals.num_guessed > 50 and len(proposals.told) > 30
    if most_off is None:
        return
    compare(proposals, tensors, num_layers, most_off)


def compare(
    proposals: Proposals, tensors: dict[str, Tensor], num_layers: int, most_off: float
) -> None:
    """Some guesses that were told with those of the heads behind the states of transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_folder(None), dtype=torch.float32)
    output_VH = model.get_output_embeddings().weight
    for known, guesses in random.Random(1).sample(proposals.told, 25):
        with torch.inference_mode():
            states = model.model(torch.tensor([known])).last_hidden_state[0]
            logits = said_by(tensors, num_layers, states[-2], output_VH)
        assert 1 <= len(guesses) <= len(logits)
        for guess, logits_V in zip(guesses, logits, strict=False):
            assert logits_V[guess] >= logits_V.max() - most_off


def test_heads_guess_behind_guesses_that_were_right():
    """The embedded heads, which know stories: three guesses of four are kept, and behind the last
    of them the next ones begin."""
    tokenizer = Tokenizer(model_folder(None))
    requests = [
        greedy(number, tokenizer.chat_ids([{"role": "user", "content": text}]), 60)
        for number, text in enumerate(
            f"Tell me a story about a {animal}." for animal in ("fox", "dog", "bird", "cow")
        )
    ]
    options = {"max_model_len": 256, "kernels": "torch", "dtype": "float32"}
    engine, proposals = asking_engine(model_folder(None), **options)
    answers = finish(engine, requests)
    assert answers == finish(engine_for(model_folder(None), **options), requests)
    assert proposals.num_kept > 0.5 * proposals.num_guessed > 50
    lengths = {len(request.prompt_token_ids) + 1 for request in requests}
    assert any(len(known) in lengths for known, _ in proposals.told), "none behind a prompt"
    tensors = {name: t.float() for name, t in load_file(model_folder(None) / FILE).items()}
    compare(proposals, tensors, 2, 1e-3)


def test_who_is_asked(folder: Path):
    """`auto` takes heads that lie in the folder, a drafting model that is given, or lookahead."""

    def speculation(**options: object):
        table = EngineOptions(device="cpu", **options)
        return plan_settings(folder, table)[1].speculation

    found = speculation(speculative_method="auto")
    assert found.drafter == "" and found.sources[-1] == "lookahead"
    write(folder, random_heads(3, 1, own=False), facts(3, 1, "shared"))
    found = speculation(speculative_method="auto")
    assert found.sources[-1] == found.drafter == "medusa" and found.max_proposed == 3
    assert speculation(speculative_method="medusa", num_speculative_tokens=2).max_proposed == 2
    assert speculation(speculative_method="auto", draft_model="headway-draft").drafter == "draft"
    assert speculation(speculative_method="ngram").medusa is None and not speculation().sources
    with pytest.raises(UsageError, match="only one of them"):
        speculation(speculative_method="draft,medusa", draft_model="headway-draft")
    (folder / FILE).unlink()
    with pytest.raises(UsageError, match=r"needs medusa\.safetensors"):
        speculation(speculative_method="ngram,medusa")


def test_heads_are_no_weights_of_the_model(folder: Path):
    """Whatever lies there, it is not read unless somebody asks for it."""
    (folder / FILE).write_bytes(b"no heads at all")
    requests = some_requests(random.Random(6), 2)
    answers = finish(engine_for(folder, max_model_len=256), requests)
    assert answers == finish(engine_for(model_folder(None), max_model_len=256), requests)


GOOD = facts(2, 1, "shared")
BAD = {
    "no metadata": ({}, {}, "medusa_num_heads is 'None'"),
    "a head that is missing": (GOOD | {"medusa_num_heads": "3"}, {}, r"2\.0\.linear\.bias is miss"),
    "a head too many": (GOOD | {"medusa_num_heads": "1"}, {}, r"1\.0\.linear\.bias is left over"),
    "another form": (GOOD | {"head": "own"}, {}, r"0\.1\.weight is missing"),
    "an unknown form": (GOOD | {"head": "tree"}, {}, "head is 'tree'"),
    "no heads": (GOOD | {"medusa_num_heads": "0"}, {}, "from 1 to 16"),
    "too many heads": (GOOD | {"medusa_num_heads": "99999999"}, {}, "from 1 to 16"),
    "another hidden size": (
        GOOD,
        {"1.0.linear.weight": torch.zeros(64, 64)},
        r"\[64, 64\]; this model has \[192, 192\]",
    ),
    "another vocabulary": (
        facts(2, 1, "own"),
        {f"{head}.1.weight": torch.zeros(61, HIDDEN) for head in (0, 1)},
        r"\[61, 192\]; this model has \[4096, 192\]",
    ),
    "whole numbers": (
        GOOD,
        {"0.0.linear.bias": torch.zeros(HIDDEN, dtype=torch.int64)},
        "type I64",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_does_not_fit_is_refused(folder: Path, case: str):
    told, other, words = BAD[case]
    write(folder, random_heads(2, 1, own=False) | other, told)
    for method in ("medusa", "auto"):
        with pytest.raises(CheckpointError, match=words):
            plan_settings(folder, EngineOptions(device="cpu", speculative_method=method))


def test_a_file_that_is_cut_off_is_refused(folder: Path):
    write(folder, random_heads(2, 1, own=False), GOOD)
    whole = (folder / FILE).read_bytes()
    cut = [whole[:length] for length in (0, 7, 100, len(whole) - 1)]
    for spoiled in (*cut, whole.replace(b'"shape"', b'"sharp"', 1)):
        (folder / FILE).write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=r"medusa\.safetensors"):
            plan_settings(folder, EngineOptions(device="cpu", speculative_method="medusa"))


def test_the_embedded_heads_are_small():
    path = model_folder(None) / FILE
    tensors = load_file(path)
    assert path.stat().st_size < 1_000_000
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
