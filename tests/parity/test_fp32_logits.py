"""Logits are fp32 from the head's product on, whatever the model's type and whoever multiplies.

In bf16 a logit of 16 to 32 is a multiple of 1/8: then two tokens that the model tells apart have
one log-probability, and a greedy answer is the token with the lower id.
"""

import pytest
import torch
from torch.testing import assert_close

from drive import engine_for, finish, greedy
from headway.core.request import Request, SamplingParams
from headway.runtime.kernels import onednn, reference
from headway.runtime.kernels.quantized import RoundedLinear
from headway.runtime.kernels.table import PlainLinear
from headway.runtime.kernels.upcast import UpcastLinear
from headway.runtime.native.fp8 import NativeFp8Linear
from headway.runtime.native.linear import NativeLinear
from headway.runtime.native.quantized import NativeQuantizedLinear
from headway.runtime.rounding import round_weight_fp8
from headway.spec.formats import INT8, ROTATED_INT8, Format
from parity.logits import their_logits
from parity.native_sets import each_instruction_set, loaded
from parity.tiny import prompts, save, tiny_model
from ranked import ranks

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def library(request: pytest.FixtureRequest):
    return loaded(*request.param)


def rows_and_weight(dtype: torch.dtype, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a matrix whose products are some tens, (T, 96) and (75, 96)."""
    draw = torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, 96, generator=draw), torch.randn(75, 96, generator=draw)
    return (3 * x).to(dtype), weight.to(dtype)


def assert_wide(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """fp32 numbers that the model's type does not hold, as close to `exact` as fp32 sums are."""
    assert found.dtype == torch.float32
    assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)
    assert (found != found.to(dtype).float()).float().mean() > 0.9


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@each_instruction_set
def test_native_products_of_wide_rows(library, dtype: torch.dtype, tokens: int):
    """Plain weights, rounded ones and FP8, in every set: the numbers before they were rounded."""
    x, weight = rows_and_weight(dtype, tokens)
    kernel = NativeLinear(library)
    packed = kernel.prepare(weight)
    found = kernel(x.float(), packed, None)
    assert_wide(found, x.double() @ weight.double().T, dtype)
    assert torch.equal(found.to(dtype), kernel(x, packed, None))
    for format in (INT8, Format("int4", 32), Format("int4", 64)):
        rounded = NativeQuantizedLinear(library, format)
        levels = rounded.prepare(weight)
        wide = rounded(x.float(), levels, None)
        assert wide.dtype == torch.float32
        assert torch.equal(wide.to(dtype), rounded(x, levels, None))
    fp8 = NativeFp8Linear(library, Format("fp8"))
    numbers = fp8.pack(round_weight_fp8(weight))
    assert torch.equal(fp8(x.float(), numbers, None).to(dtype), fp8(x, numbers, None))


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_torchs_products_of_wide_rows(dtype: torch.dtype, tokens: int):
    """The reference, and what stands in for it on a CPU without bf16."""
    x, weight = rows_and_weight(dtype, tokens)
    exact = x.double() @ weight.double().T
    kernels = [PlainLinear(reference.linear), PlainLinear(UpcastLinear(reference.linear))]
    if onednn.available():
        kernels += [onednn.PackedLinear(), PlainLinear(UpcastLinear(onednn.linear))]
    for kernel in kernels:
        assert_wide(kernel(x.float(), kernel.prepare(weight), None), exact, dtype)
    bias = torch.ones(75, dtype=dtype)
    assert_wide(reference.linear(x.float(), weight, bias), exact + 1, dtype)
    for rounded in (RoundedLinear(INT8), RoundedLinear(ROTATED_INT8)):
        levels = rounded.prepare(weight)
        wide = rounded(x.float(), levels, None)
        assert wide.dtype == torch.float32
        assert torch.equal(wide.to(dtype), rounded(x, levels, None))


@pytest.fixture(scope="module", params=["llama", "gemma2", "granite"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, its folder): a plain head, one that is capped and one that is scaled;
    in bf16."""
    sizes = {"final_logit_softcapping": 50.0} if request.param == "gemma2" else {}
    reference_model = tiny_model(request.param, **sizes).bfloat16()
    return reference_model, save(reference_model, tmp_path_factory.mktemp(request.param))


def logprobs_of(answer) -> torch.Tensor:
    """Those of a prompt's tokens and of the likeliest beside them."""
    entries = answer.prompt_logprobs[1:] + answer.logprobs
    return torch.tensor([[entry.logprob, *entry.top_logprobs] for entry in entries])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"kernels": "torch"},
        {"kernels": "torch", "quantization": "int8"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "native",
)
def test_log_probabilities_are_no_multiples_of_what_bf16_holds(model, options):
    """Alternatives of one position differ by what two logits do: in bf16 by multiples of 2^-9 at
    least where both are beyond 1/2. Here nearly none does, and no two likeliest are the same."""
    _, folder = model
    asked = [
        greedy(number, prompt, 4, logprobs=3, prompt_logprobs=3)
        for number, prompt in enumerate(prompts([40, 23]))
    ]
    with ranks(folder, dtype="bfloat16", **options) as engine:
        answers = finish(engine, asked)
    found = torch.cat([logprobs_of(answer) for answer in answers.values()])[:, 1:].double()
    apart = found[:, :1] - found[:, 1:]
    assert (apart > 0).all()
    assert ((apart * 512).frac().abs() > 1e-3).double().mean() > 0.9


@torch.inference_mode()
def test_logits_are_what_the_head_makes_of_bf16_states(model):
    """To fp32's rounding: cap and scale too are of numbers that nobody has rounded."""
    theirs, folder = model
    engine = engine_for(folder, dtype="bfloat16")
    forward = engine.executor.target  # type: ignore[attr-defined]
    hidden_RH = torch.randn(5, forward.spec.hidden_size).bfloat16()
    states = forward.model.norm(hidden_RH).double()
    exact = states @ theirs.get_output_embeddings().weight.double().T
    exact = exact * forward.spec.logits_scale
    if cap := forward.spec.logits_softcap:
        exact = cap * torch.tanh(exact / cap)
    assert_wide(forward.logits(hidden_RH), exact, torch.bfloat16)


def test_tokens_and_log_probabilities_are_of_the_same_numbers(model):
    """The greedy token is the likeliest of those told, and is the one of rank 1."""
    _, folder = model
    for options in ({}, {"kernels": "torch"}):
        engine = engine_for(folder, dtype="bfloat16", **options)
        seeded = SamplingParams(
            temperature=1.0, top_k=1, seed=3, max_tokens=30, logprobs=2, ignore_eos=True
        )
        (prompt,) = prompts([30])
        found = finish(engine, [greedy(1, prompt, 30, logprobs=2), Request(2, prompt, seeded)])
        for answer in found.values():
            for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
                assert token == entry.token_id == entry.top_ids[0] and entry.rank == 1
                assert entry.top_logprobs[0] > entry.top_logprobs[1]
        assert found[1, 0].token_ids == found[2, 0].token_ids


def test_bf16_is_as_close_to_transformers_as_its_states_are(model):
    """Its logits are of its own states: what is left of the distance to transformers' bf16 is what
    that rounds at its end, at most half a step of 2^-8 of a logit's size."""
    theirs, folder = model
    (prompt,) = prompts([1])
    engine = engine_for(folder, dtype="bfloat16", kernels="torch")
    request = greedy(1, prompt, 1, logprobs=5)
    (entry,) = finish(engine, [request])[1, 0].logprobs
    logits = their_logits(theirs, prompt)[-1]
    ours, rounded = torch.tensor(entry.top_logprobs), logits.log_softmax(-1)[entry.top_ids]
    assert (ours - rounded).abs().max() < 2.0**-7 * float(logits.abs().max())
