"""Variable-length kernels: what they are given, and what a model computes with FlashAttention's kernel in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch

from prefrl.models.attention import interface as attention
from prefrl.models.attention import varlen
from prefrl.models.attention.interface import KERNELS, choose_kernel
from prefrl.models.attention.segments import Layout
from tests.assets import tiny_model
from tests.flash import HALF, Flash, as_package, as_torchs_kernel
from tests.unit.models.test_attention import (
    DEEP,
    every_forest,
    forest,
    random_qkv,
    sees,
    total_length,
    visible_positions,
    written_out,
)
from tests.unit.models.test_block_mask import LAYOUTS
from tests.unit.models.test_forest import EPISODES, RUNS, numbers

FLOAT32 = (torch.float32,)


@pytest.fixture(params=["torch", "flash-attn"])
def put_in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Flash], None]]:
    """Lets a kernel in plain torch be torch's own, or that of the package flash-attn."""
    with ExitStack() as stack:

        def put(flash: Flash) -> None:
            if request.param == "torch":
                stack.enter_context(as_torchs_kernel(flash))
                run = varlen._torch_kernel()
            else:
                as_package(flash, monkeypatch)
                run = varlen._flash_attn_kernel()
            monkeypatch.setattr(varlen, "kernel", lambda: run)

        yield put


@pytest.mark.parametrize("window", [None, 1, 3, 6, 200])
def test_every_shape_of_a_forest_is_seen_right(window, put_in_place):
    put_in_place(Flash(FLOAT32))
    for trees in every_forest():
        attend = partial(varlen.attend, layout=Layout(trees), scaling=None, window=window)
        assert torch.equal(sees(attend, trees), visible_positions(trees, window)), trees


@pytest.mark.parametrize("window", [None, 1, 7, 150])
@pytest.mark.parametrize("trees", LAYOUTS)
def test_outputs_and_gradients_are_those_of_what_each_token_sees(trees, window, put_in_place):
    put_in_place(Flash(FLOAT32))
    tensors = random_qkv(total_length(trees), dtype=torch.float32)
    output = varlen.attend(*tensors, Layout(trees), scaling=0.3, window=window)
    expected = written_out(*tensors, visible_positions(trees, window), 0.3)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    expected_grads = torch.autograd.grad((expected * weights).sum(), tensors)
    grads = torch.autograd.grad((output * weights).sum(), tensors)
    torch.testing.assert_close(grads, expected_grads, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_tensors_as_projections_leave_them_are_what_the_kernel_takes(dtype, put_in_place):
    put_in_place(Flash())
    shapes = [x.shape for x in random_qkv(total_length(DEEP))]
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, tokens, heads, size, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_()
        for _, heads, tokens, size in shapes
    ]
    output = varlen.attend(*tensors, Layout(DEEP), scaling=None, window=3)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    expected = written_out(*exact, visible_positions(DEEP, 3), 8**-0.5)
    grads = torch.autograd.grad(output.sum(), tensors)
    for found, truth in zip(grads, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert (found - truth).norm() < 0.02 * truth.norm() + 0.02
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("put_in_place", ["torch"], indirect=True)
@pytest.mark.parametrize(("name", "architecture", "overrides"), RUNS)
def test_a_model_gives_the_numbers_of_padded_rows(name, architecture, overrides, put_in_place, monkeypatch, caplog):
    flash, model = Flash(FLOAT32), tiny_model(architecture, **overrides)
    expected = numbers(model, EPISODES[name], "padded")
    put_in_place(flash)
    kernel = replace(KERNELS[1], serves=lambda inputs: True, needs_cuda=False)
    monkeypatch.setattr(
        attention, "choose_kernel", lambda inputs, layout: choose_kernel(inputs, layout, (kernel, KERNELS[-1]))
    )
    for plan in ("shared_prefix", "packed"):
        before = flash.num_calls
        found = numbers(model, EPISODES[name], plan)
        assert flash.num_calls >= before + 2, "one for each layer"
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=5e-6)
        assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()
    assert caplog.records == []


# What the kernel in torch must refuse: how it is called -> a part of the message.
BROKEN = {
    "float32": (lambda a: a | {"query": a["query"].float()}, "only support fp16 and bf16"),
    "two dtypes": (lambda a: a | {"value": a["value"].float()}, "must have the same dtype"),
    "heads": (lambda a: a | {"key": a["key"][:, :1].repeat(1, 3, 1)}, "must divide"),
    "head size": (lambda a: a | {n: a[n][..., :4].contiguous() for n in ("query", "key", "value")}, "multiple of 8"),
    "values without a key": (lambda a: a | {"value": a["value"][:-1]}, "the same shape"),
    "columns": (lambda a: a | {"key": a["key"].mT.contiguous().mT}, "contiguous last dimension"),
    "int64": (lambda a: a | {"key_offsets": a["key_offsets"].long()}, "dtype int32"),
    "stride": (lambda a: a | {"key_offsets": a["key_offsets"].repeat_interleave(2)[::2]}, "must be contiguous"),
    "start": (lambda a: a | {"query_offsets": a["query_offsets"] + 1}, "start with 0"),
    "end": (lambda a: a | {"query_offsets": a["query_offsets"].clamp(max=4)}, "end with the number of tokens"),
    "order": (lambda a: a | {"key_offsets": a["key_offsets"][[0, 2, 1, 3]]}, "must not decrease"),
    "sequences": (
        lambda a: a | {"key_offsets": a["key_offsets"][[0, 1, 3]], "longest_key": 8},
        "an entry for each sequence",
    ),
    "longest": (lambda a: a | {"longest_key": 4}, "longer than max_seqlen"),
    "tensor": (lambda a: a | {"longest_key": torch.tensor(9)}, "a number of the host"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_kernel_in_torch_refuses_what_the_cuda_kernel_cannot_take(name):
    change, message = BROKEN[name]
    query, key, value = (x.detach().squeeze(0).transpose(0, 1).half() for x in random_qkv(11))
    offsets = {"query_offsets": [0, 3, 5, 6], "key_offsets": [0, 3, 8, 11]}
    arguments = {"query": query[:6], "key": key, "value": value, "longest_query": 3, "longest_key": 5}
    arguments |= {name: torch.tensor(starts, dtype=torch.int32) for name, starts in offsets.items()}
    Flash().forward(**arguments, scale=None, window=(-1, 0))
    with pytest.raises(AssertionError, match=message):
        Flash().forward(**change(arguments), scale=None, window=(-1, 0))


def test_sequences_by_hand():
    held = varlen.sequences(Layout(forest((3, 2, 0, 1), 2)), None)
    assert held.query_offsets.tolist() == [0, 3, 5, 6, 8]
    assert held.key_offsets.tolist() == [0, 3, 8, 12, 14]
    assert held.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 7]
    assert (held.longest_query, held.longest_key) == (3, 5)
    assert {held.query_offsets.dtype, held.key_offsets.dtype} == {torch.int32}


def test_a_window_copies_no_more_of_the_trunk_than_it_reaches():
    held = varlen.sequences(Layout(forest((9, 2, 1))), 3)
    assert held.keys.tolist() == [*range(9), 7, 8, 9, 10, 7, 8, 11]
    assert held.longest_key == 9


def test_a_segment_sees_all_segments_that_it_continues_and_no_other():
    layout = Layout(forest((2, 1, (2, 1))))
    assert varlen.sequences(layout, None).keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 0, 1, 3, 4, 5]
    assert varlen.sequences(layout, 3).keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 3, 4, 5]


def test_rows_without_branches_are_not_copied():
    assert varlen.sequences(Layout(forest(3, 4)), None).keys is None


@pytest.mark.parametrize(("window", "reach"), [(None, (-1, 0)), (1, (0, 0)), (5, (4, 0))])
def test_kernels_count_a_window_without_the_token_itself(window, reach):
    assert varlen._reach(window) == reach


def test_torchs_own_kernel_is_called_as_this_torch_spells_it():
    assert varlen.kernel() is not None
    tensors = [x.detach().bfloat16() for x in random_qkv(8)]
    # There is none for the CPU: it is found, reads every argument, and gets as far as choosing the device.
    with pytest.raises(NotImplementedError, match="CPU"):
        varlen.attend(*tensors, Layout(forest((3, 2, 1), 2)), scaling=0.3, window=2)
