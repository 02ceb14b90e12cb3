"""The block mask against what each token sees, worked out by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask

from prefrl.models.attention import block_mask, segments
from prefrl.models.attention import interface as attention
from prefrl.models.attention.interface import KERNELS
from prefrl.models.attention.segments import Layout
from tests.assets import tiny_model
from tests.unit.models.test_attention import (
    DEEP,
    RAGGED,
    every_forest,
    forest,
    random_qkv,
    total_length,
    visible_positions,
)
from tests.unit.models.test_forest import EPISODES, RUNS, numbers

CPU = torch.device("cpu")
TREES = forest((140, 130, 60, 1), (128, 128, 10))
# Each turn a branch and the next turn, which starts in the middle of a block.
SPINE = forest((200, 70, (33, 40, (95, 20, (130, 150, (9, 300, 2))))), (64, (64, (64, 64), 64), 64))
LAYOUTS = [
    pytest.param(RAGGED, id="small"),
    pytest.param(forest(300), id="one-sequence"),
    pytest.param(forest(1), id="one-token"),
    pytest.param(forest(256), id="whole-blocks"),
    pytest.param(TREES, id="trees"),
    pytest.param(forest((140, 200, 300)), id="long-branches"),
    pytest.param(forest((5, 3, 0, 4, 0), 200), id="empty-branches"),
    pytest.param(forest(100, 28, 128, 1, 127), id="packed"),
    pytest.param(DEEP, id="deep"),
    pytest.param(SPINE, id="spine"),
    pytest.param(forest((1, (0, 2, (150, 0, 40), 3)), (0, (130, 1))), id="empty-trunks"),
]
WINDOWS = [None, 1, 7, 128, 200]


@pytest.fixture
def compilations():
    """Compiles without inductor, which would take a minute, and counts."""
    counter = CompileCounter()
    block_mask._compiled.cache_clear()
    with torch.compiler.set_stance("default", force_backend=counter):
        yield counter
    block_mask._compiled.cache_clear()


def dense(mask):
    """[T, T] bool of a mask function, padding included."""
    total = mask.seq_lengths[0]
    positions = torch.arange(total)
    zero = torch.zeros((), dtype=torch.long)
    return mask.mask_mod(zero, zero, positions[:, None], positions[None])


def listed(counts, indices):
    """[blocks, blocks] bool from the lists of a block mask: each row's first `counts` entries of `indices`.

    They are read as compiled kernels do, from memory: the entries of a row one after another, then those of the next.
    """
    rows, columns = indices.shape[-2:]
    blocks = torch.zeros(rows, columns, dtype=torch.bool)
    entries = indices.as_strided((rows, columns), (columns, 1)).tolist()
    for row, (count, entries_of_row) in enumerate(zip(counts.flatten().tolist(), entries, strict=True)):
        assert len(set(entries_of_row[:count])) == count
        blocks[row, entries_of_row[:count]] = True
    return blocks


def lists(mask):
    """The blocks that need a mask and those that do not, by queries, then the same by keys."""
    return (
        listed(mask.kv_num_blocks, mask.kv_indices),
        listed(mask.full_kv_num_blocks, mask.full_kv_indices),
        listed(mask.q_num_blocks, mask.q_indices),
        listed(mask.full_q_num_blocks, mask.full_q_indices),
    )


def in_blocks(seen):
    """[blocks, blocks, 128 * 128] of a [T, T] matrix."""
    blocks = len(seen) // 128
    return seen.view(blocks, 128, blocks, 128).transpose(1, 2).reshape(blocks, blocks, -1)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("trees", LAYOUTS)
def test_the_mask_shows_each_token_what_it_may_see(trees, window):
    total = total_length(trees)
    seen = dense(block_mask.block_mask(Layout(trees), window, CPU))
    assert torch.equal(seen[:total, :total], visible_positions(trees, window))
    padding = seen[total:]
    assert not padding[:, :total].any()
    assert not seen[:total, total:].any()
    assert padding.any(dim=1).all()  # a row that sees nothing would be NaN


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("trees", LAYOUTS)
def test_blocks_are_kept_if_and_only_if_something_in_them_is_visible(trees, window):
    mask = block_mask.block_mask(Layout(trees), window, CPU)
    pairs = in_blocks(dense(mask))
    partial, full, partial_by_keys, full_by_keys = lists(mask)
    assert torch.equal(partial | full, pairs.any(-1))
    assert not (partial & full).any()
    assert pairs.all(-1)[full].all()
    # For the gradients of keys the same blocks are listed by keys.
    assert torch.equal(partial_by_keys.t(), partial)
    assert torch.equal(full_by_keys.t(), full)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block", [2, 4])
def test_every_shape_of_a_forest_has_the_blocks_that_torch_finds(block, window, monkeypatch):
    """With small blocks; torch evaluates its mask function at every pair of tokens."""
    monkeypatch.setattr(block_mask, "BLOCK", block)
    for trees in every_forest(4):
        mask = block_mask.block_mask(Layout(trees), window, CPU)
        total, padding = mask.seq_lengths[0], mask.seq_lengths[0] - total_length(trees)
        seen = visible_positions((*trees, (padding, -1)), window)
        assert torch.equal(dense(mask), seen), trees
        found = create_block_mask(
            lambda b, h, query, key: seen[query, key],  # noqa: B023
            *(None, None, total, total),
            device="cpu",
            BLOCK_SIZE=block,
        )
        for ours, theirs in zip(lists(mask), lists(found), strict=True):
            assert torch.equal(ours, theirs), trees


BLOCKS = [
    pytest.param(RAGGED, {0, 2, 4, 8}, id="small"),
    pytest.param(TREES, {1, 4}, id="trees"),
    pytest.param(SPINE, {0, 5, 8, 11}, id="spine"),
    pytest.param(forest((140, (200, 300))), {1}, id="long"),
]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("trees", "images"), BLOCKS)
def test_segments_that_see_all_of_themselves(trees, images, window):
    total = total_length(trees)
    mask = block_mask.block_mask(Layout(trees, blocks=frozenset(images)), window, CPU)
    assert torch.equal(dense(mask)[:total, :total], visible_positions(trees, window, images))
    pairs = in_blocks(dense(mask))
    partial, full, *_ = lists(mask)
    assert torch.equal(partial | full, pairs.any(-1))
    assert pairs.all(-1)[full].all()


def test_two_branches_of_a_block_each_leave_out_their_sibling():
    mask = block_mask.block_mask(Layout(forest((256, 128, 128), 100)), None, CPU)
    assert mask.seq_lengths == (640, 640)
    partial = listed(mask.kv_num_blocks, mask.kv_indices).int().tolist()
    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices).int().tolist()
    assert partial == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert full == [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_blocks_that_the_window_leaves_behind_are_dropped():
    mask = block_mask.block_mask(Layout(forest(512)), 129, CPU)
    # The first query of a block sees 128 keys before itself: all of the block before, nothing of the one before that.
    assert listed(mask.kv_num_blocks, mask.kv_indices).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert mask.full_kv_num_blocks.sum() == 0


@pytest.mark.parametrize(("total", "padded"), [(1, 256), (256, 256), (257, 384), (384, 384), (10_000, 10_112)])
def test_rows_are_padded_to_whole_blocks_and_two_at_least(total, padded):
    assert block_mask.bucket(total) == padded


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("trees", [RAGGED, TREES, DEEP, SPINE])
def test_block_attention_equals_attention_segment_by_segment(trees, window, compilations):
    tensors = [x.detach() for x in random_qkv(total_length(trees), dtype=torch.float32)]
    layout = Layout(trees)
    expected = segments.attend(*tensors, layout, scaling=0.3, window=window)
    output = block_mask.attend(*tensors, layout, scaling=0.3, window=window)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert compilations.frame_count == 1  # and not the uncompiled kernel, which makes T x T scores


@pytest.mark.parametrize(("name", "architecture", "overrides"), RUNS)
@pytest.mark.usefixtures("compilations")
def test_a_model_gives_the_numbers_of_padded_rows(name, architecture, overrides, monkeypatch):
    model = tiny_model(architecture, **overrides)
    expected = numbers(model, EPISODES[name], "padded")
    monkeypatch.setattr(attention, "choose_kernel", lambda inputs, layout: KERNELS[2])
    # torch has no gradients of its compiled kernel on the CPU, and refuses those of the uncompiled one as well.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    for plan in ("shared_prefix", "packed"):
        found = numbers(model, EPISODES[name], plan)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=5e-6)
        assert (found[1] - expected[1]).norm() <= 1e-5 * expected[1].norm()


@pytest.mark.kernels  # the compiler takes 20 s
def test_torchs_compiled_kernel_reads_the_lists_as_they_are_meant():
    """That of the CPU. The uncompiled one, of the tests above, looks at the mask function only."""
    torch.compiler.reset()  # what earlier tests compiled decides what is compiled for any size
    block_mask._compiled.cache_clear()
    # The first is long: for two blocks, torch 2.13 writes C++ that does not compile.
    for trees in (SPINE, forest(1400), forest((700, 300, 200)), forest((140, *[150] * 6)), TREES, RAGGED):
        tensors = [x.detach() for x in random_qkv(total_length(trees), dtype=torch.float32)]
        for window in (None, 20, 300):
            with torch.no_grad():
                output = block_mask.attend(*tensors, Layout(trees), scaling=0.3, window=window)
            expected = segments.attend(*tensors, Layout(trees), scaling=0.3, window=window)
            torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_many_shapes_share_a_compilation_or_two(compilations):
    for round_ in range(6):
        deep = (30, 9, (8 * round_ + 1, 4, (3, 1, 2)))
        trees = forest((40 * round_ + 1, 7, 100 * round_), 64, *[deep] * round_)
        tensors = [x.detach() for x in random_qkv(total_length(trees), dtype=torch.float32)]
        for window in (None, 10 + round_):
            block_mask.attend(*tensors, Layout(trees), scaling=None, window=window)
    # A pass without gradients does not read the blocks by key: torch takes their number for constant until it changes.
    assert compilations.frame_count <= 2


def test_each_kind_of_inputs_has_its_own_number_of_variants_that_torch_compiles(compilations):
    tensors = [x.detach() for x in random_qkv(9, dtype=torch.float32)]
    with torch._dynamo.config.patch(recompile_limit=1):
        for scaling in (0.1, 0.2, 0.3):
            block_mask.attend(*tensors, Layout(forest(9)), scaling=scaling, window=None)
    assert compilations.frame_count == 3


def test_compiled_code_is_not_bound_to_the_autocast_around_its_first_use(compilations):
    tensors = [x.detach() for x in random_qkv(9, dtype=torch.float32)]
    attend = partial(block_mask.attend, layout=Layout(forest(9)), scaling=None, window=None)
    expected = attend(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(attend(*tensors), expected)
    assert compilations.frame_count == 1


def test_layers_and_recomputation_share_one_block_mask(compilations):
    tensors = [x.detach() for x in random_qkv(9, dtype=torch.float32)]
    layout = Layout(forest(9))
    for _ in range(2):
        for window in (None, 3):
            block_mask.attend(*tensors, layout, scaling=None, window=window)
    assert len(layout._made) == 2


def test_a_block_that_several_ancestors_fill_together_needs_no_mask():
    mask = block_mask.block_mask(Layout(forest((50, (30, (48, 1, 127, 128))))), None, CPU)
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices).int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 0, 0]]
