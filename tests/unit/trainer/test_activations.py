"""Where the activations of a forward pass are kept until its backward pass."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn

from prefrl import SFTConfig, SFTTrainer
from prefrl.models.forward import token_logprobs
from prefrl.models.kernels import OffloadActivations
from prefrl.models.modes import checkpoint_activations
from prefrl.trainer.features import parts_of_models
from prefrl.trainer.features.kernels import Offloading
from prefrl.types import TokenBatch
from tests.assets import tiny_model, tiny_tokenizer

# Without a CUDA device these hooks copy to memory that is not pinned.
DEVICE_TYPE = "cuda"


class Recorder(OffloadActivations):
    """Notes what is moved and what stays."""

    def __init__(self, *, smallest_bytes: int = 0) -> None:
        super().__init__(DEVICE_TYPE, smallest_bytes=smallest_bytes)
        self.moved: list[torch.Size] = []
        self.kept: list[torch.Size] = []
        self.moved_bytes = 0
        move = self.pack_hook

        def pack(tensor: torch.Tensor) -> Any:
            packed = move(tensor)
            is_moved = isinstance(packed, tuple)
            (self.moved if is_moved else self.kept).append(tensor.shape)
            self.moved_bytes += tensor.nbytes * is_moved
            return packed

        self.pack_hook = pack


def stays(tensor: torch.Tensor, *, smallest_bytes: int = 0) -> bool:
    """Whether it is left where it is, in the same memory."""
    packed = OffloadActivations(DEVICE_TYPE, smallest_bytes=smallest_bytes).pack_hook(tensor)
    return isinstance(packed, torch.Tensor) and packed.data_ptr() == tensor.data_ptr()


def test_an_activation_is_copied_and_comes_back_as_it_was() -> None:
    offload = OffloadActivations(DEVICE_TYPE, smallest_bytes=0)
    activation = nn.Parameter(torch.arange(6.0).reshape(2, 3)) * 2
    packed = offload.pack_hook(activation)
    activation.data.zero_()
    assert offload.unpack_hook(packed).tolist() == [[0, 2, 4], [6, 8, 10]]


def test_weights_and_what_autocast_makes_of_them_stay() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    assert stays(weight)
    assert stays(weight.t())
    assert stays(weight.to(torch.bfloat16))
    assert stays(weight.to(torch.bfloat16).t())
    assert not stays((weight * 2).to(torch.bfloat16))
    # The output of frozen embeddings that PEFT lets require a gradient: a leaf, but no weight.
    assert not stays(torch.ones(3, 2).requires_grad_())


def test_what_has_no_gradient_stays() -> None:
    assert stays(torch.ones(3, 2))
    assert stays(nn.Parameter(torch.ones(3, 2)).detach())


@pytest.mark.parametrize(("size", "is_small"), [(4, False), (3, True)])
def test_small_tensors_stay(size: int, is_small: bool) -> None:
    activation = nn.Parameter(torch.ones(size)) * 2
    assert stays(activation, smallest_bytes=16) is is_small


@pytest.mark.parametrize("smallest_bytes", [0, 10**9], ids=["moved", "kept"])
def test_a_graph_with_its_own_output_in_it_is_freed_at_once(smallest_bytes: int) -> None:
    with OffloadActivations(DEVICE_TYPE, smallest_bytes=smallest_bytes):
        output = nn.Parameter(torch.ones(3)).exp()  # saves its output
    is_alive = weakref.ref(output)
    del output
    assert is_alive() is None


def rows() -> TokenBatch:
    """Two prompts with two responses each."""
    lengths = (6, 3, 9, 4)
    generator = torch.Generator().manual_seed(0)
    return TokenBatch(
        prompt_ids=torch.randint(128, (12,), generator=generator),
        prompt_lengths=(5, 7),
        prompt_index=(0, 0, 1, 1),
        response_ids=torch.randint(128, (sum(lengths),), generator=generator),
        response_lengths=lengths,
        trainable=torch.ones(sum(lengths), dtype=torch.bool),
        group_index=(0, 0, 1, 1),
    )


def gradient(model: nn.Module, plan: Any, offload: OffloadActivations | None, *, autocast: bool) -> torch.Tensor:
    """Of all parameters, of a loss that reads log-probs and entropy."""
    model.zero_grad()
    token_logprobs(model, rows(), plan=plan)  # the model's check is not what is looked at
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), offload or contextlib.nullcontext():
        scores = token_logprobs(model, rows(), plan=plan, want=("entropy", "entropy_gradient"))
    (scores.logprobs * torch.linspace(-1, 1, 22) + scores.entropy).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["all", "checkpoints", "reentrant checkpoints"])
@pytest.mark.parametrize("plan", ["shared_prefix", "packed", "padded"])
def test_gradients_are_those_of_a_pass_that_moves_nothing(
    plan: str, use_reentrant: bool | None, autocast: bool
) -> None:
    model, offload = tiny_model().train(), Recorder()
    if use_reentrant is not None:
        checkpoint_activations(model, {"use_reentrant": use_reentrant})
    expected = gradient(model, plan, None, autocast=autocast)
    assert torch.equal(gradient(model, plan, offload, autocast=autocast), expected)
    assert offload.moved


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_model_moves_its_activations_and_none_of_its_weights(autocast: bool) -> None:
    model, offload = tiny_model(tie_word_embeddings=True).train(), Recorder()
    gradient(model, "padded", offload, autocast=autocast)
    shapes = {parameter.shape for parameter in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    assert not shapes & set(offload.moved)
    # Four rows of up to 15 tokens: what the projections of attention and of the MLP read, in both layers.
    assert [offload.moved.count(torch.Size([60, width])) for width in (32, 64)] == [6 + 2 + 4, 2]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_move_their_inputs_alone(use_reentrant: bool) -> None:
    model, everything, inputs = tiny_model().train(), Recorder(), Recorder()
    gradient(model, "shared_prefix", everything, autocast=False)
    checkpoint_activations(model, {"use_reentrant": use_reentrant})
    gradient(model, "shared_prefix", inputs, autocast=False)
    tokens = 12 + 22 - 4  # the last token of a response is not fed
    # Two layers, and the norm behind them: its input twice, and its output.
    assert inputs.moved.count(torch.Size([1, tokens, 32])) == 2 + 3
    assert inputs.moved_bytes < 0.2 * everything.moved_bytes


def test_the_option_is_what_moves_activations(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    data = Dataset.from_list([{"text": "to be"}])
    trainer = SFTTrainer(tiny_model(), config, train_dataset=data, processing_class=tiny_tokenizer())
    assert trainer.parts.get(Offloading) is None
    trainer.args.activation_offloading = True  # the config refuses it on a CPU
    (part,) = parts_of_models(trainer.args, trainer.policy)
    assert isinstance(part, Offloading)
    assert isinstance(part.activations(), OffloadActivations)
