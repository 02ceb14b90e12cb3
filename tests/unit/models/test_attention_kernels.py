"""Which kernel computes flat attention, and what happens to one that does not work."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from prefrl.models.attention import interface as kernels
from prefrl.models.attention import segments
from prefrl.models.attention.interface import Inputs, Kernel, choose_kernel
from prefrl.models.attention.segments import Layout
from tests.unit.models.test_attention import forest

INPUTS = Inputs(torch.device("cpu"), torch.float32, num_heads=4, num_kv_heads=2, key_size=8, value_size=8, scaling=0.3)
LAST = kernels.KERNELS[-1]
LAYOUT = Layout(((5, -1),))


def kernel(attend, name="new"):
    return Kernel(name, attend, lambda inputs: True)


def right(query, key, value, layout, *, scaling, window):
    return segments.attend(query, key, value, layout, scaling=scaling, window=window)


def no_compiler(query, key, value, layout, *, scaling, window):
    raise RuntimeError("Failed to find C compiler")


def no_backward(query, key, value, layout, *, scaling, window):
    output = right(query, key, value, layout, scaling=scaling, window=window)
    if output.requires_grad:
        output.register_hook(lambda grad: 1 / 0)
    return output


def only_with_gradients(query, key, value, layout, *, scaling, window):
    if not torch.is_grad_enabled():
        raise NotImplementedError("no forward without gradients")
    return right(query, key, value, layout, scaling=scaling, window=window)


def ignores_windows(query, key, value, layout, *, scaling, window):
    return right(query, key, value, layout, scaling=scaling, window=None)


def branches_alone(query, key, value, layout, *, scaling, window):
    alone = Layout(tuple((length, -1) for length in layout.lengths))
    return right(query, key, value, alone, scaling=scaling, window=window)


def children_without_grandparents(query, key, value, layout, *, scaling, window):
    """Right for trunks and branches, but what is below a branch sees the branch alone."""
    outputs = []
    for number, segment in enumerate(layout.segments):
        seen = [*segment.ancestors[-1:], number]
        tokens = torch.cat([torch.arange(layout.segments[n].start, layout.segments[n].stop) for n in seen])
        q, k, v = (x[:, :, tokens] for x in (query, key, value))
        part = Layout(((len(tokens), -1),))
        outputs.append(right(q, k, v, part, scaling=scaling, window=window)[:, -segment.length :])
    return torch.cat(outputs, 1)


def forgets_gradients_of_values(query, key, value, layout, *, scaling, window):
    return right(query, key, value.detach() + 0 * value, layout, scaling=scaling, window=window)


def not_a_number(query, key, value, layout, *, scaling, window):
    return right(query, key, value, layout, scaling=scaling, window=window) * float("nan")


def test_the_order_is_variable_length_then_blocks_then_segments():
    assert [k.name for k in kernels.KERNELS] == ["variable-length", "block-mask", "segment-by-segment"]


@pytest.mark.parametrize(
    ("dtype", "sizes", "served"),
    [
        (torch.bfloat16, (64, 64), {"variable-length", "block-mask"}),
        (torch.float16, (256, 256), {"variable-length", "block-mask"}),
        (torch.bfloat16, (512, 512), {"block-mask"}),
        (torch.bfloat16, (60, 60), {"block-mask"}),
        (torch.bfloat16, (192, 128), {"block-mask"}),
        (torch.float32, (64, 64), {"block-mask"}),
        (torch.float64, (64, 64), set()),
    ],
)
def test_kernels_are_asked_only_for_what_they_are_made_for(dtype, sizes, served):
    first, second, last = kernels.KERNELS
    on_cuda = Inputs(torch.device("cuda", 0), dtype, 4, 2, *sizes, scaling=None)
    on_cpu = Inputs(torch.device("cpu"), dtype, 4, 2, *sizes, scaling=None)
    assert {k.name for k in (first, second) if k.serves(on_cuda)} == served
    assert all(k.needs_cuda for k in (first, second))
    assert last.serves(on_cuda)
    assert choose_kernel(on_cpu, LAYOUT) is last


def test_the_kernel_that_copies_histories_is_not_taken_for_long_episodes():
    def episode(num_turns):
        spine = [(20, number - 1) for number in range(num_turns)]
        return Layout((*spine, (5, num_turns - 1)))

    first, second, _ = kernels.KERNELS
    group = Layout(((1000, -1), *((10, 0) for _ in range(64))))
    assert first.suits(group)
    assert first.suits(episode(12))
    assert not first.suits(episode(40))
    assert second.suits(episode(40))
    assert not first.suits(Layout(group.forest, blocks=frozenset({0}))), "its mask is causal"
    assert second.suits(Layout(group.forest, blocks=frozenset({0})))
    works, passed_over = kernel(right), replace(kernel(right), suits=lambda layout: False)
    assert choose_kernel(INPUTS, LAYOUT, (passed_over, works, LAST)) is works


def test_a_kernel_that_works_is_taken_without_a_word(caplog):
    works = kernel(right)
    assert choose_kernel(INPUTS, LAYOUT, (works, kernel(no_compiler), LAST)) is works
    assert caplog.records == []


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (no_compiler, "RuntimeError: Failed to find C compiler"),
        (no_backward, "ZeroDivisionError"),
        (only_with_gradients, "no forward without gradients"),
        (ignores_windows, "differs from segment-by-segment attention"),
        (children_without_grandparents, "differs from segment-by-segment attention"),
        (branches_alone, "differs from segment-by-segment attention"),
        (forgets_gradients_of_values, "differs from segment-by-segment attention"),
        (not_a_number, "by up to inf"),
    ],
)
def test_a_kernel_that_does_not_work_is_passed_over_with_one_warning(attend, reason, caplog):
    broken, works = kernel(attend, "broken"), kernel(right)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert choose_kernel(INPUTS, LAYOUT, (broken, works, LAST)) is works
    (message,) = [record.getMessage() for record in caplog.records]
    assert "broken" in message
    assert reason in message


def test_kernels_are_tried_again_for_other_inputs():
    tried = []

    def remembers(query, key, value, layout, *, scaling, window):
        tried.append((query.dtype, query.size(1), key.size(1), query.size(3), value.size(3), scaling))
        return right(query, key, value, layout, scaling=scaling, window=window)

    works = kernel(remembers)
    others = Inputs(torch.device("cpu"), torch.bfloat16, 6, 3, 16, 8, scaling=None)
    for inputs in (INPUTS, INPUTS, others):
        assert choose_kernel(inputs, LAYOUT, (works, LAST)) is works
    assert set(tried) == {(torch.float32, 4, 2, 8, 8, 0.3), (torch.bfloat16, 6, 3, 16, 8, None)}
    assert len(tried) == 2 * len(kernels._TRIALS) * len(kernels._TRIAL_WINDOWS) * 2  # with gradients and without


def test_running_out_of_memory_says_nothing_about_a_kernel():
    def hungry(query, key, value, layout, *, scaling, window):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        choose_kernel(INPUTS, LAYOUT, (kernel(hungry), LAST))


def test_a_trial_neither_sees_nor_changes_what_surrounds_it():
    seen = []

    def draws(query, key, value, layout, *, scaling, window):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        torch.rand(3)
        return right(query, key, value, layout, scaling=scaling, window=window)

    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        works = kernel(draws)
        assert choose_kernel(INPUTS, LAYOUT, (works, LAST)) is works
    assert set(seen) == {(False, False)}
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_use_inside_a_checkpointed_layer_leaves_its_count_of_saved_tensors_alone():
    works = kernel(right)
    layout = Layout(forest((4, 2, 3)))
    query, key, value = kernels._random_tensors(INPUTS, layout)

    def layer(query):
        chosen = choose_kernel(INPUTS, LAYOUT, (works, LAST))
        return chosen.attend(query, key, value, layout, scaling=None, window=None)

    output = checkpoint(layer, query, use_reentrant=False)
    (grad,) = torch.autograd.grad(output.sum(), query)
    expected = right(query, key, value, layout, scaling=None, window=None)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), query)[0])
