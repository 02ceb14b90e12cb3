"""The kernels of flat attention on a CUDA device: equal numbers, no waiting, few compilations, no more memory."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from prefrl.models.attention import interface as attention
from prefrl.models.attention import interface as kernels
from prefrl.models.attention import segments, varlen
from prefrl.models.attention.interface import LAYOUT_KWARG, Inputs, choose_kernel
from prefrl.models.attention.segments import Layout
from prefrl.models.forward import token_logprobs, verdict_of
from prefrl.models.modes import checkpoint_activations
from prefrl.models.plans import lay_out
from prefrl.types import TokenBatch
from tests.assets import tiny_model
from tests.unit.models.test_attention import DEEP, RAGGED, forest, total_length, visible_positions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG, VARLEN, BLOCKS, SEGMENTS = kernels.KERNELS
KERNELS_AND_DTYPES = [
    pytest.param(VARLEN, torch.bfloat16, id="variable-length-bfloat16"),
    pytest.param(LONG, torch.bfloat16, id="long-segments-bfloat16"),
    pytest.param(BLOCKS, torch.bfloat16, id="block-mask-bfloat16"),
    pytest.param(BLOCKS, torch.float32, id="block-mask-float32"),
    pytest.param(SEGMENTS, torch.bfloat16, id="segment-by-segment-bfloat16"),
    pytest.param(SEGMENTS, torch.float32, id="segment-by-segment-float32"),
]
# Relative error by norm; what a product in that dtype loses, several times over.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.02}
TREES = forest((130, 40, 1, 90), 33, (7, 200, (3, 150, (30, 5), 20)))
HEADS, KV_HEADS, DIM = 4, 2, 32


def random_tensors(trees, dtype, *, seed=0):
    """Query, key and value on the device, whose heads lie together as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(1, total_length(trees), h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)]
    return [x.to("cuda", dtype).transpose(1, 2).requires_grad_() for x in values]


def written_out(query, key, value, seen):
    """In float64, from the definition."""
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (key, value))
    scores = (query @ key.transpose(-1, -2) * DIM**-0.5).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def relative_error(values, truth):
    return ((values.double() - truth.double()).norm() / truth.double().norm()).item()


def assert_near(values, truth, dtype):
    """By norm; some gradients are exactly 0."""
    for a, b in zip(values, truth, strict=True):
        error = (a.double() - b.double()).norm().item()
        assert error < TOLERANCES[dtype] * (b.double().norm().item() + 1)


def warnings_of(caplog):
    """Ours; torch's compiler has its own."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("prefrl")]


def results(attend, tensors):
    """Output and gradients, for weights that differ from token to token."""
    output = attend(*tensors)
    weights = torch.linspace(-1, 1, output.size(1), device=output.device, dtype=output.dtype)[:, None, None]
    return [output, *torch.autograd.grad((output * weights).sum(), tensors)]


def shared_prompt_batch(prompt_lengths, response_lengths, *, rows_per_prompt, vocab_size=128):
    """Each prompt with `rows_per_prompt` responses, of lengths taken in turn, on the device."""
    generator = torch.Generator().manual_seed(0)
    prompt_index = tuple(p for p in range(len(prompt_lengths)) for _ in range(rows_per_prompt))
    lengths = tuple(response_lengths[row % len(response_lengths)] for row in range(len(prompt_index)))
    return TokenBatch(
        prompt_ids=torch.randint(2, vocab_size, (sum(prompt_lengths),), generator=generator),
        prompt_lengths=tuple(prompt_lengths),
        prompt_index=prompt_index,
        response_ids=torch.randint(2, vocab_size, (sum(lengths),), generator=generator),
        response_lengths=lengths,
        trainable=torch.ones(sum(lengths), dtype=torch.bool),
        group_index=prompt_index,
    ).to("cuda")


def test_half_precision_takes_the_variable_length_kernel_and_float32_the_block_mask(caplog):
    assert varlen.kernel() is not None
    for dtype, expected in [(torch.bfloat16, VARLEN), (torch.float16, VARLEN), (torch.float32, BLOCKS)]:
        tensors = random_tensors(RAGGED, dtype)
        assert choose_kernel(Inputs.of(*tensors, None), Layout(RAGGED)) is expected
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS_AND_DTYPES)
def test_every_token_sees_its_own_segment_and_its_ancestors_only(kernel, dtype, window):
    tensors = random_tensors(TREES, dtype)
    layout = Layout(TREES)
    seen = visible_positions(TREES, window).cuda()
    expected = results(lambda *qkv: written_out(*qkv, seen), tensors)
    found = results(lambda *qkv: kernel.attend(*qkv, layout, scaling=None, window=window), tensors)
    assert_near(found, expected, dtype)
    with torch.no_grad():
        assert_near([kernel.attend(*tensors, layout, scaling=None, window=window)], expected[:1], dtype)


@pytest.mark.parametrize("trees", [forest(1), forest(256), forest((3, *[1] * 70)), forest(*[1] * 300), DEEP])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS_AND_DTYPES[:4])
def test_odd_layouts_are_served_too(kernel, dtype, trees):
    tensors = random_tensors(trees, dtype)
    exact = [x.detach().float().requires_grad_() for x in tensors]
    expected = results(lambda *qkv: segments.attend(*qkv, Layout(trees), scaling=0.2, window=None), exact)
    found = results(lambda *qkv: kernel.attend(*qkv, Layout(trees), scaling=0.2, window=None), tensors)
    assert_near(found, expected, dtype)


def test_a_trunk_gets_the_gradient_of_all_its_branches_in_half_precision():
    rows = torch.zeros(2, 1, 1, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    index = torch.tensor([0] * 1000 + [1], device="cuda")
    varlen.gather(rows, index).sum().backward()
    assert rows.grad.flatten().tolist() == [1000.0, 1.0]  # summed in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize("plan", ["shared_prefix", "packed"])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS_AND_DTYPES)
def test_flat_plans_are_as_near_to_the_cpu_as_padded_rows_are(kernel, dtype, plan, monkeypatch, caplog):
    def scores(model, plan):
        batch = shared_prompt_batch((30, 5), (7, 40, 1), rows_per_prompt=4).to(model.device)
        model.zero_grad(set_to_none=True)
        logprobs = token_logprobs(model, batch, plan=plan).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs), device=model.device)).sum().backward()
        return logprobs.detach().cpu(), torch.cat([p.grad.cpu().float().flatten() for p in model.parameters()])

    asked = []

    def choose(inputs, layout):
        asked.append(inputs)
        return choose_kernel(inputs, layout, (kernel, SEGMENTS))

    sizes = {"sliding_window": 20, "head_dim": 16}
    logprobs, gradient = scores(tiny_model("mistral", **sizes), "padded")
    model = tiny_model("mistral", **sizes).to("cuda", dtype).train()
    checkpoint_activations(model, {"use_reentrant": False})
    padded_logprobs, padded_gradient = scores(model, "padded")
    monkeypatch.setattr(attention, "choose_kernel", choose)
    flat_logprobs, flat_gradient = scores(model, plan)
    assert len(asked) == 2 * model.config.num_hidden_layers  # once more in the backward pass
    assert warnings_of(caplog) == []
    floor = TOLERANCES[dtype]
    assert relative_error(flat_logprobs, logprobs) < 2 * relative_error(padded_logprobs, logprobs) + floor
    assert relative_error(flat_gradient, gradient) < 2 * relative_error(padded_gradient, gradient) + floor


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS_AND_DTYPES[:4])
def test_attention_never_waits_for_the_device(kernel, dtype, window):
    def step(seed):
        trees = forest((140 + seed, 40, 1, (90, 7, (20, 3))), 33 + seed)
        tensors = random_tensors(trees, dtype, seed=seed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            output = kernel.attend(*tensors, Layout(trees), scaling=None, window=window)
            output.float().square().sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # Compiles, which may wait.
    assert choose_kernel(Inputs.of(*random_tensors(TREES, dtype), None), Layout(TREES), (kernel, SEGMENTS)) is kernel
    for seed in range(3):
        step(seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_models_layers_never_wait_for_the_device(dtype):
    model = tiny_model("llama", head_dim=16).to("cuda", dtype).train()
    batch = shared_prompt_batch((30, 5), (7, 40, 1), rows_per_prompt=4)
    assert verdict_of(model).reasons == {}
    token_logprobs(model, batch).logprobs.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs = lay_out(batch, "shared_prefix")
        output = model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            attention_mask=torch.empty(1, 1, 1, 0, dtype=torch.bool, device=inputs.input_ids.device),
            use_cache=False,
            **{LAYOUT_KWARG: inputs.layout},
        )
        output.last_hidden_state.float().square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_after_its_trial_the_block_mask_kernel_is_compiled_no_more():
    def graphs():
        return counters["stats"]["unique_graphs"]

    assert choose_kernel(Inputs.of(*random_tensors(TREES, torch.float32), None), Layout(TREES)) is BLOCKS
    before = graphs()
    for step in range(10):
        trees = forest((97 * step + 1, 7, (100 * step + 1, 5, (3, 2))), *[30] * (3 * step))
        for window in (None, 10 + step):
            tensors = random_tensors(trees, torch.float32, seed=step)
            attend = partial(BLOCKS.attend, layout=Layout(trees), scaling=None, window=window)
            results(attend, tensors)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                attend(*tensors)
    assert graphs() == before


def test_a_head_size_that_no_fast_kernel_takes_is_served_segment_by_segment(caplog):
    tensors = [x[..., :4].contiguous() for x in random_tensors(RAGGED, torch.float32)]
    with caplog.at_level(logging.WARNING):
        assert choose_kernel(Inputs.of(*tensors, None), Layout(RAGGED)) is SEGMENTS
    (message,) = warnings_of(caplog)
    assert "block-mask" in message


@pytest.mark.parametrize(("kernel", "dtype"), [(VARLEN, torch.bfloat16), (BLOCKS, torch.float32)])
def test_a_kernel_that_fails_is_replaced_before_the_plan_is(kernel, dtype, monkeypatch, caplog):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel image")

    order = [kernels.Kernel(k.name, broken, k.serves) if k is kernel else k for k in kernels.KERNELS]
    monkeypatch.setattr(attention, "choose_kernel", lambda inputs, layout: choose_kernel(inputs, layout, order))
    model = tiny_model("llama", head_dim=16).to("cuda", dtype)
    with caplog.at_level(logging.WARNING):
        assert verdict_of(model).reasons == {}
    (message,) = warnings_of(caplog)
    assert "no such kernel image" in message


def test_flat_plans_need_no_more_memory_than_padded_rows():
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "max_position_embeddings": 2048}
    model = tiny_model("llama", **sizes).to("cuda", torch.bfloat16).train()
    with torch.no_grad():
        for parameter in model.parameters():  # wide layers of the tiny model's weights would magnify rounding
            parameter.mul_(0.3)
    batch = shared_prompt_batch((512, 700), (16, 200, 60, 256), rows_per_prompt=8)

    def peak(plan):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        token_logprobs(model, batch, plan=plan).logprobs.sum().backward()
        return torch.cuda.max_memory_allocated() - base

    peaks = {plan: [peak(plan) for _ in range(2)][-1] for plan in ("padded", "packed", "shared_prefix")}
    assert peaks["packed"] < peaks["padded"]
    assert peaks["shared_prefix"] < 0.5 * peaks["padded"]
