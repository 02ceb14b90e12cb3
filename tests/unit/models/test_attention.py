"""Flat attention against softmax(q k^T) v written out for each token."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from prefrl.models.attention import interface as attention
from prefrl.models.attention import interface as kernels
from prefrl.models.attention import segments, varlen
from prefrl.models.attention.interface import (
    LAYOUT_KWARG,
    Inputs,
    Kernel,
    choose_kernel,
    flat_attention,
)
from prefrl.models.attention.segments import Layout
from prefrl.models.modes import checkpoint_activations
from tests.assets import tiny_model

HEADS, KV_HEADS, DIM = 4, 2, 8
EMPTY_MASK = torch.empty(1, 1, 1, 0, dtype=torch.bool)  # what stands for the masks of a layout


def forest(*trees):
    """The forest of a layout, from nested trees: the length of a root, or that followed by the trees below it."""
    found = []

    def add(tree, parent):
        length, *below = (tree,) if isinstance(tree, int) else tree
        found.append((length, parent))
        number = len(found) - 1
        for branch in below:
            add(branch, number)

    for tree in trees:
        add(tree, -1)
    return tuple(found)


RAGGED = forest((5, 3, 1, 7), 4, (2, 6), (1, 1, 2))
DEEP = forest((4, 3, (2, 5, (1, 1, (6, 2, 3)), 4)), 3, (1, (2, (1, (2, 4, 1)))))


def every_forest(most_segments=5):
    """Forests of every shape up to a number of segments, with ragged lengths; some segments are empty."""
    shapes = [()]
    for shape in shapes:
        if len(shape) < most_segments:
            path, last = [-1], len(shape) - 1  # those that the next segment may continue
            while last >= 0:
                path, last = [*path, last], shape[last]
            shapes += [(*shape, parent) for parent in path]
    lengths = (3, 1, 0, 5, 2, 4)
    return [
        tuple((lengths[(i + number) % len(lengths)], parent) for i, parent in enumerate(shape))
        for number, shape in enumerate(shapes[1:])
    ]


def with_siblings_in_sight(segments):
    """The forest in which a segment continues the one before it with the same parent."""
    last = {-1: -1}  # the youngest child of each segment
    changed = []
    for number, (length, parent) in enumerate(segments):
        changed.append((length, last.get(parent, parent)))
        if parent >= 0:
            last[parent] = number
    return tuple(changed)


def visible_positions(segments, window=None, blocks=()):
    """[T, T] bool, from the definition: own segment up to oneself, and all of those that it continues.

    In blocks, the own segment is all of it, whatever the window.
    """
    paths = []
    for number, (_, parent) in enumerate(segments):
        paths.append([*(paths[parent] if parent >= 0 else []), number])
    continues = torch.tensor([[other in path for other in range(len(segments))] for path in paths])
    number = [s for s, (length, _) in enumerate(segments) for _ in range(length)]
    before = [sum(segments[other][0] for other in path[:-1]) for path in paths]
    position = torch.tensor([before[s] + p for s, (length, _) in enumerate(segments) for p in range(length)])
    distance = position[:, None] - position
    seen = continues[number][:, number] & (distance >= 0)
    if window is not None:
        seen &= distance < window
    own = torch.tensor([s if s in blocks else -1 - i for i, s in enumerate(number)])
    return seen | (own[:, None] == own)


def random_qkv(total, *, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, HEADS, total, DIM), (1, KV_HEADS, total, DIM), (1, KV_HEADS, total, DIM)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def sees(attend, trees):
    """[T, T] bool: whose values reach each output, if each token has a value of its own and scores are all equal."""
    total = total_length(trees)
    size = -(-total // 8) * 8
    zeros = torch.zeros(1, 1, total, size)
    return attend(zeros, zeros, torch.eye(total, size)[None, None])[0, :, 0, :total] > 0


def written_out(query, key, value, seen, scaling):
    groups = HEADS // KV_HEADS
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2) * scaling).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def total_length(segments):
    return sum(length for length, _ in segments)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trees", [RAGGED, DEEP], ids=["ragged", "deep"])
def test_every_token_sees_its_own_segment_and_its_ancestors_only(trees, window, dtype):
    tensors = random_qkv(total_length(trees), dtype=dtype)
    expected = written_out(*tensors, visible_positions(trees, window), scaling=0.3)
    output = flat_attention(*tensors, Layout(trees), scaling=0.3, dropout=0.0, window=window)
    torch.testing.assert_close(output, expected)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    expected_grads = torch.autograd.grad((expected * weights).sum(), tensors)
    torch.testing.assert_close(torch.autograd.grad((output * weights).sum(), tensors), expected_grads)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(("trees", "blocks"), [(RAGGED, {0, 2, 4, 8}), (DEEP, {1, 2, 6, 12})], ids=["ragged", "deep"])
def test_tokens_of_a_block_also_see_those_after_themselves(trees, blocks, window):
    tensors = random_qkv(total_length(trees))
    expected = written_out(*tensors, visible_positions(trees, window, blocks), scaling=0.3)
    layout = Layout(trees, blocks=frozenset(blocks))
    output = flat_attention(*tensors, layout, scaling=0.3, dropout=0.0, window=window)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("window", [None, 5, 40])
def test_long_segments_are_masked_in_chunks_with_equal_results(window, monkeypatch):
    trees = forest((30, 37, 20), 45)
    tensors = random_qkv(total_length(trees))
    whole = flat_attention(*tensors, Layout(trees), scaling=None, dropout=0.0, window=window)
    monkeypatch.setattr(segments, "_ROWS_PER_MASK", 16)
    layout = Layout(trees)
    chunked = flat_attention(*tensors, layout, scaling=None, dropout=0.0, window=window)
    torch.testing.assert_close(chunked, whole)
    rows_kept = {mask.size(0) for mask in layout._made.values()}
    assert rows_kept == {16}


@pytest.mark.parametrize("window", [None, 40])
def test_long_segments_compute_their_ancestors_once_more_with_equal_results(window, monkeypatch):
    trees = forest((30, 62, 20, (70, 15)), 45)
    tensors = [x.requires_grad_() for x in random_qkv(total_length(trees))]

    def found():
        output = flat_attention(*tensors, Layout(trees), scaling=None, dropout=0.0, window=window)
        weights = torch.linspace(-1, 1, output.size(1))[:, None, None]
        return [output, *torch.autograd.grad((output * weights).sum(), tensors)]

    expected = found()
    masks, original = [], segments._mask
    monkeypatch.setattr(segments, "_mask", lambda layout, rows, *_: masks.append(rows) or original(layout, rows, *_))
    monkeypatch.setattr(segments, "_LONG", 80)
    torch.testing.assert_close(found(), expected)
    # The others: one below its parent is too short, one below two of them has too many ancestors.
    assert masks == ([20, 15] if window is None else masks)


@pytest.mark.parametrize(("window", "module"), [(None, segments), (7, varlen)])
def test_layers_with_a_window_of_a_long_row_take_the_variable_length_kernel(window, module, monkeypatch):
    monkeypatch.setattr(module, "attend", lambda *args, scaling, window: (scaling, window))
    assert kernels.KERNELS[0].attend(None, None, None, LAYOUT, scaling=0.3, window=window) == (0.3, window)


def test_a_layout_is_long_if_most_of_its_work_is():
    assert segments.is_long(Layout(forest((1024, *[8192] * 8))))
    assert segments.is_long(Layout(forest((1024, 8192, 2000, 7000), 300)))
    assert segments.is_long(Layout(forest(4096, 4096)))
    assert not segments.is_long(Layout(forest(4095, 4095)))
    assert not segments.is_long(Layout(forest((1024, *[1024] * 8))))
    assert not segments.is_long(Layout(forest((8192, *[2048] * 8)))), "these would mostly compute their ancestors"
    assert not segments.is_long(Layout(forest(4096, *[1000] * 40)))
    assert not segments.is_long(Layout(forest(4096), blocks=frozenset({0})))


@pytest.mark.parametrize("window", [None, 1, 3, 6])
def test_every_shape_of_a_forest_is_seen_right(window):
    for trees in every_forest():
        output = sees(lambda *qkv: segments.attend(*qkv, Layout(trees), scaling=None, window=window), trees)  # noqa: B023
        assert torch.equal(output, visible_positions(trees, window)), trees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_begin_where_kernels_of_a_gpu_can_read_them(dtype, monkeypatch):
    masks = []

    def kept(*args, attn_mask, **kwargs):
        masks.append(attn_mask)
        return sdpa(*args, attn_mask=attn_mask, **kwargs)

    sdpa = segments.scaled_dot_product_attention
    monkeypatch.setattr(segments, "scaled_dot_product_attention", kept)
    monkeypatch.setattr(segments, "_ROWS_PER_MASK", 16)
    trees = forest((30, 37, 21), 45)
    tensors = [x.to(dtype) for x in random_qkv(total_length(trees))]
    flat_attention(*tensors, Layout(trees), scaling=None, dropout=0.0, window=20)
    assert len(masks) > 4
    assert {mask.storage_offset() for mask in masks} == {0}


def test_siblings_and_other_trees_do_not_reach_a_branch():
    trees = forest((4, 3, 3), 5)
    query, key, value = random_qkv(total_length(trees))

    def output():
        return flat_attention(query, key, value, Layout(trees), scaling=None, dropout=0.0, window=None)

    before = output()
    with torch.no_grad():
        value[:, :, 7:10] += 1.0  # the second branch
    changed = (output() - before).abs().amax(dim=(0, 2, 3)) > 0
    assert changed.tolist() == [False] * 7 + [True] * 3 + [False] * 5


def test_segments_that_are_not_in_depth_first_order_are_refused():
    assert [s.ancestors for s in Layout(((2, -1), (1, 0), (3, 0), (1, 2), (1, 0))).segments] == [
        (),
        (0,),
        (0,),
        (0, 2),
        (0,),
    ]
    for broken in (((2, -1), (3, -1), (1, 0)), ((2, -1), (3, 0), (1, 0), (1, 1)), ((2, 1), (3, -1))):
        with pytest.raises(ValueError, match="follows no descendant of its parent"):
            Layout(broken).segments  # noqa: B018


def test_gradient_checkpointing_recomputes_with_the_layout_of_its_own_forward():
    model = tiny_model("llama").train()
    attention.install(model)
    ids = torch.arange(2, 14)[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 4, 5]])

    def hidden(*trees):
        layout = {LAYOUT_KWARG: Layout(forest(*trees)), "attention_mask": EMPTY_MASK}
        return model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **layout).last_hidden_state

    def gradient():
        model.zero_grad()
        first = hidden((4, 2, 4, 2)).square().sum()
        second = hidden(12).square().sum()  # another layout between a forward and its backward
        (first + 2 * second).backward()
        return torch.cat([p.grad.flatten() for p in model.base_model.parameters()])

    expected = gradient()
    checkpoint_activations(model, {"use_reentrant": True})
    torch.testing.assert_close(gradient(), expected)


@pytest.mark.parametrize("kwargs", [{"softcap": 5.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_attention_that_we_do_not_implement_is_refused(kwargs):
    model = tiny_model("llama")
    module = model.model.layers[0].self_attn
    query, key, value = random_qkv(4)
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        attention._sdpa_or_flat(module, query, key, value, None, **{LAYOUT_KWARG: Layout(forest(4))}, **kwargs)


def test_a_mask_that_is_not_ours_is_refused():
    module = tiny_model("llama").model.layers[0].self_attn
    query, key, value = random_qkv(4)
    mask = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="attention_mask"):
        attention._sdpa_or_flat(module, query, key, value, mask, **{LAYOUT_KWARG: Layout(forest(4))})


def test_a_model_that_drops_the_layout_is_noticed():
    module = tiny_model("llama").model.layers[0].self_attn
    query, key, value = random_qkv(4)
    with pytest.raises(ValueError, match="does not pass it on"):
        attention._sdpa_or_flat(module, query, key, value, EMPTY_MASK)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
def test_installed_attention_changes_nothing_without_a_layout(architecture, implementation):
    overrides = {"sliding_window": 6} if architecture == "mistral" else {}
    model = tiny_model(architecture, attn_implementation=implementation, **overrides)
    ids = torch.randint(2, 128, (3, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, :1] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    assert attention.install(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    assert attention.reads_layouts(copy.deepcopy(model))
    attention.uninstall(model)
    assert model.config._attn_implementation == implementation


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


def test_the_order_is_long_segments_then_variable_length_then_blocks_then_segments():
    names = ["long-segments", "variable-length", "block-mask", "segment-by-segment"]
    assert [k.name for k in kernels.KERNELS] == names


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
    _, first, second, last = kernels.KERNELS
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

    _, first, second, _ = kernels.KERNELS
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
