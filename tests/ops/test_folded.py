"""What is made of weights alone is made once, and nothing else changes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ergoflow.models import A3MConfig, ErgoformerConfig, build_model
from ergoflow.models.convnext import ConvNeXtConfig
from ergoflow.ops.folded import Folded
from ergoflow.ops.inference import recorded_inference

A3M = A3MConfig(dim=8, latent=16, depth=2, heads=4, head_dim=4, decoder_widths=(8,), decoder_kernels=(3,), groups=4)
UNET = ConvNeXtConfig(widths=(8, 16), blocks=(1, 1, 1), kernel=3)
ERGOFORMER = ErgoformerConfig(unet=UNET, heads=2, frequencies=2)


class Counter(TorchDispatchMode):
    """Counts the operations that are really run."""

    def __init__(self):
        super().__init__()
        self.run = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.run += 1
        return func(*args, **(kwargs or {}))


def forward(model, state, folded=None, *, inference=True):
    """Return the result under bfloat16 autocast and the number of operations, counted below `folded`."""
    with (
        torch.inference_mode() if inference else torch.no_grad(),
        Counter() as counter,
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        folded or nullcontext(),
    ):
        return model(state), counter.run


def drawn(config):
    generator = torch.Generator().manual_seed(0)
    model = build_model(config, 1, 1, (16, 16), periodic=(True, True), generator=generator)
    # Heads and merges start at zero, and would hide mistakes.
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model, torch.randn(3, 2, 1, 16, 16, generator=generator)


@pytest.mark.parametrize("inference", [True, False], ids=["inference", "no grad"])
@pytest.mark.parametrize("config", [A3M, ERGOFORMER], ids=["a3m", "ergoformer"])
def test_results_are_the_same_bit_by_bit_with_fewer_operations(config, inference):
    model, states = drawn(config)
    folded = Folded(model.parameters())
    _, all_of_them = forward(model, states[0], inference=inference)
    counts = []
    for state in (*states, states[0]):
        expected, _ = forward(model, state, inference=inference)
        found, count = forward(model, state, folded, inference=inference)
        assert torch.equal(found, expected)
        counts.append(count)
    # Every matrix was cast at least once per call, and is no more.
    matrices = sum(parameter.ndim > 1 for parameter in model.parameters())
    assert counts[1] == counts[2] == counts[3] <= all_of_them - matrices
    assert counts[0] <= all_of_them


def test_position_codes_are_made_once_where_their_frequencies_are_known():
    state = torch.randn(2, 1, 16, 16, generator=torch.Generator().manual_seed(1))

    def operations(*, frequencies):
        # Its features are kept from the first call on: a fresh model has none yet.
        model, _ = drawn(A3M)
        folded = Folded((*model.parameters(), *(model.buffers() if frequencies else ())))
        found = [forward(model, state, folded) for _ in range(2)]
        assert torch.equal(found[0][0], found[1][0])
        return found[1][1]

    codes = A3M.depth
    assert operations(frequencies=True) <= operations(frequencies=False) - codes


def test_what_depends_on_other_tensors_is_made_anew():
    weight, state = nn.Parameter(torch.ones(3)), torch.ones(3)
    with torch.no_grad(), Folded([weight]):
        first = weight * 2 + state
        assert weight * 2 is weight * 2
        assert weight.to(torch.float64) is weight.to(torch.float64)
        whole = weight.to(torch.int64)
        assert (whole * 2).dtype == torch.int64
        assert (whole * 2.0).dtype == torch.float32
        state += 1
        assert torch.equal(weight * 2 + state, first + 1)
        # Random numbers and memory to be filled are not results.
        assert not torch.equal(torch.rand_like(weight), torch.rand_like(weight))
        assert torch.empty_like(weight) is not torch.empty_like(weight)
        assert weight.clone() is not weight.clone()
        assert weight.clone().add_(1).sum() == 6
    assert weight * 2 is not weight * 2


def test_writing_to_a_weight_or_to_what_is_made_of_it_raises():
    weight = nn.Parameter(torch.ones(3))
    with torch.no_grad(), Folded([weight]):
        doubled = weight * 2
        for target in (weight, doubled, doubled[:2]):
            with pytest.raises(RuntimeError, match="must not be written to"):
                target.add_(1)
        with pytest.raises(RuntimeError, match="must not be written to"):
            torch.add(torch.ones(3), 1, out=doubled)
        # Reading them into something else is allowed.
        assert torch.zeros(3).add_(doubled).sum() == 6


def test_away_from_a_gpu_inference_is_the_model_in_its_precision():
    model, states = drawn(A3M)
    with torch.inference_mode():
        for precision in ("fp32", "tf32", "bf16"):
            step = recorded_inference(model, precision=precision, device=torch.device("cpu"))
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                expected = model(states[0])
            assert torch.equal(step(states[0]), expected)


def test_tf32_is_allowed_within_a_step_that_asks_for_it_and_nowhere_else():
    libraries = torch.backends.cuda.matmul, torch.backends.cudnn
    before, seen = [library.allow_tf32 for library in libraries], []

    def step(state: torch.Tensor) -> torch.Tensor:
        seen.append([library.allow_tf32 for library in libraries])
        return state

    for precision in ("fp32", "tf32", "bf16"):
        recorded_inference(step, precision=precision, device=torch.device("cpu"))(torch.zeros(1))
    assert seen == [[False, False], [True, True], [False, False]]
    assert [library.allow_tf32 for library in libraries] == before


@pytest.mark.gpu
@pytest.mark.parametrize("config", [A3M, ERGOFORMER], ids=["a3m", "ergoformer"])
def test_on_a_gpu_a_recording_of_folded_weights_repeats_the_model(config):
    model, states = drawn(config)
    model, states = model.cuda(), states.cuda()
    step = recorded_inference(model, precision="bf16", device=torch.device("cuda"))
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
        expected = [model(state) for state in states]
    with torch.inference_mode():
        for state, wanted in zip(states, expected, strict=True):
            assert torch.equal(step(state), wanted)
