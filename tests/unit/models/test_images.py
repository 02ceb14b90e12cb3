"""Flat rows with images: five families of models against their own forward, one row at a time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import LoraConfig, get_peft_model

from prefrl.data.images import ImageReader
from prefrl.models import forward, selfcheck
from prefrl.models.forward import set_image_example, token_logprobs, verdict_of
from prefrl.models.images import RowPositions, adapts_images, image_rules, placeholder_ids
from prefrl.models.plans import lay_out
from prefrl.trainer.arguments import example_batch
from prefrl.types import Images, TokenBatch
from tests.assets import ragged_batch, tiny_model
from tests.vlms import FAMILIES, tiny_vlm

VISION = ("vision", "visual", "multi_modal_projector", "connector")


def prepared(family):
    model, processor = tiny_vlm(family)
    example = example_batch(ImageReader(processor))
    set_image_example(model, example)
    return model, example


def gradients(model, total):
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def one_by_one(model, batch):
    """[N] log-probs of the model's own forward, row by row."""
    rules, logprobs = image_rules(model), []
    for row in range(batch.num_rows):
        one = batch.select([row])
        inputs = lay_out(one, "padded", rules)
        log_softmax = model(**inputs.keywords).logits.flatten(0, 1).float().log_softmax(-1)
        logprobs.append(log_softmax[inputs.predictors].gather(-1, one.response_ids[:, None]).squeeze(-1))
    return torch.cat(logprobs)


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_rows_with_images_have_the_loss_and_the_gradients_of_single_rows(family):
    model, batch = prepared(family)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    expected = one_by_one(model, batch)
    expected_grads = gradients(model, (expected * weights).sum())
    for plan in ("shared_prefix", "packed", "padded"):
        found = token_logprobs(model, batch, plan=plan).logprobs
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=2e-5)
        grads = gradients(model, (found * weights).sum())
        for part in ("vision", "language"):
            names = [name for name in expected_grads if any(word in name for word in VISION) == (part == "vision")]
            largest = max(float(expected_grads[name].abs().max()) for name in names)
            assert largest > 1e-4, f"{family}: no gradient reaches the {part} part"
            worst = max(float((grads[name] - expected_grads[name]).abs().max()) for name in names)
            assert worst < 1e-4 * largest, f"{family}, {plan}, {part}: {worst} of {largest}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_self_check_finds_that_every_plan_works(family):
    verdict = verdict_of(prepared(family)[0])
    assert (verdict.reasons, verdict.image_reasons, verdict.own_logits) == ({}, {}, False)


@pytest.mark.parametrize(
    ("family", "wrong"), [("gemma3", {"has_blocks": False}), ("qwen2_5_vl", {"rope_index": None})]
)
def test_a_family_that_is_read_wrongly_falls_back_to_padded_rows(family, wrong, monkeypatch, caplog):
    model, batch = prepared(family)
    rules = dataclasses.replace(image_rules(model), **wrong)
    for module in (forward, selfcheck):
        monkeypatch.setattr(module, "image_rules", lambda model: rules)
    verdict = verdict_of(model)
    assert set(verdict.image_reasons) == {"shared_prefix", "packed"}
    assert verdict.reasons == {}
    assert "log-probs of rows with images fall back from plan shared_prefix and packed to padded" in caplog.text
    expected = one_by_one(model, batch)
    torch.testing.assert_close(token_logprobs(model, batch).logprobs, expected, rtol=1e-4, atol=2e-5)


def test_without_an_example_rows_with_images_are_padded():
    model, processor = tiny_vlm("llava")
    batch = example_batch(ImageReader(processor))
    assert "no row with images" in verdict_of(model).image_reasons["packed"]
    torch.testing.assert_close(token_logprobs(model, batch).logprobs, one_by_one(model, batch), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("plan", "passes"), [("shared_prefix", 3), ("packed", 5)])
def test_the_vision_tower_reads_each_image_of_a_shared_prompt_once(plan, passes):
    model, batch = prepared("llava")
    token_logprobs(model, batch)  # the self-check comes first
    seen = []
    tower = model.model.vision_tower
    tower.register_forward_pre_hook(lambda module, args, kwargs: seen.append(len(args[0])), with_kwargs=True)
    token_logprobs(model, batch, plan=plan)
    # Two images before two responses, and one before a third.
    assert seen == [passes]


def test_a_batch_without_images_gives_the_tower_no_work_in_a_single_process():
    model, batch = prepared("llava")
    token_logprobs(model, batch)
    model.model.vision_tower.register_forward_pre_hook(lambda *_: pytest.fail("the tower runs"))
    token_logprobs(model, batch.select([3]))


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_beside_other_processes_a_batch_without_images_runs_the_tower_and_keeps_its_scores(family, monkeypatch):
    model, batch = prepared(family)
    text = batch.select([3])
    alone = token_logprobs(model, text, want=("entropy",))
    monkeypatch.setattr(forward, "num_processes", lambda: 2)
    together = token_logprobs(model, text, want=("entropy",))
    torch.testing.assert_close(together.logprobs, alone.logprobs)
    torch.testing.assert_close(together.entropy, alone.entropy)
    grads = gradients(model, together.logprobs.sum())
    assert any("vis" in name for name in grads), "the tower is not connected to the loss"
    assert all(float(grad.abs().max()) == 0 for name, grad in grads.items() if "vis" in name)


def test_shared_rows_of_a_team_take_no_images(monkeypatch):
    model, batch = prepared("llava")
    monkeypatch.setattr(forward, "team_size", lambda: 2)
    with pytest.raises(Exception, match="sp_size=2 with images"):
        token_logprobs(model, batch)


def test_a_model_of_text_refuses_images():
    _, batch = prepared("llava")
    with pytest.raises(ValueError, match="no vision tower"):
        token_logprobs(tiny_model(vocab_size=400), batch)


def test_placeholders_by_family():
    assert {family: placeholder_ids(tiny_vlm(family)[0]) for family in FAMILIES} == {
        "llava": [3],
        "idefics3": [4],
        "qwen2_5_vl": [5, 6],
        "qwen3_vl": [5, 6],
        "gemma3": [5],
    }
    assert image_rules(tiny_model()) is None


def test_positions_after_the_last_image_count_up():
    table = torch.tensor([[0, 1, 1, 3], [0, 1, 2, 3], [0, 1, 1, 3]])
    assert RowPositions(table).of(1, 5).tolist() == [[1, 1, 3, 4, 5], [1, 2, 3, 4, 5], [1, 1, 3, 4, 5]]


def images_of(value):
    return Images({"pixel_values": torch.full((1, 2), float(value))}, ((1, 2),))


def with_images() -> TokenBatch:
    return ragged_batch().replace(images=(images_of(0), None, images_of(2)))


def test_images_move_with_their_prompts():
    batch = with_images()  # rows of the prompts 1, 0, 1, 2, 0
    picked = batch.select([3, 0])
    assert [one and float(one.inputs["pixel_values"][0, 0]) for one in picked.images] == [2.0, None]
    assert batch.select([0]).images == (None,)
    assert not batch.select([0, 2]).has_images
    assert [one is None for one in TokenBatch.concat([ragged_batch(), batch]).images] == [True] * 3 + [
        False,
        True,
        False,
    ]
    assert TokenBatch.concat([ragged_batch(), ragged_batch()]).images == ()
    assert batch.images_of(3) is batch.images[2]
    assert ragged_batch().images_of(3) is None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reads_images", [False, True])
def test_adapters_of_the_language_model_are_told_apart(family, reads_images):
    model, _ = tiny_vlm(family)
    layers = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    chosen = [name for name in layers if any(part in name for part in VISION) == reads_images]
    assert adapts_images(get_peft_model(model, LoraConfig(r=2, target_modules=chosen))) == reads_images


def test_an_adapter_of_a_text_model_reads_no_images():
    model = tiny_model("qwen2")
    model.beside = torch.nn.Linear(2, 2)
    assert not adapts_images(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "beside"])))
