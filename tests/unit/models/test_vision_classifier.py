"""Reward models with a vision tower: flat rows with images against single rows, and files that load again."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, Llama4Config

from prefrl.data.images import ImageReader
from prefrl.errors import ConfigError
from prefrl.models import forward, selfcheck
from prefrl.models.classifier import add_classifier, sequence_scores
from prefrl.models.critic import ModelCritic, value_model
from prefrl.models.forward import set_image_example, verdict_of
from prefrl.models.images import image_rules
from prefrl.models.load import load_reward_model
from prefrl.models.plans import lay_out
from prefrl.trainer.arguments import example_batch
from tests.unit.models.test_images import VISION, gradients
from tests.vlms import FAMILIES, forget_classifiers, tiny_vision_judge, tiny_vlm


def prepared(family):
    judge, processor = tiny_vision_judge(family)
    batch = example_batch(ImageReader(processor))  # groups with two images, with one, and without
    set_image_example(judge, batch)
    return judge, batch


def one_by_one(judge, batch):
    """[B] scores of the model's own forward, row by row."""
    rules = image_rules(judge)
    rows = [lay_out(batch.select([row]), "padded", rules) for row in range(batch.num_rows)]
    return torch.cat([judge(**row.keywords).logits for row in rows]).squeeze(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_flat_rows_with_images_have_the_scores_and_the_gradients_of_single_rows(family):
    judge, batch = prepared(family)
    weights = torch.linspace(-1, 2, batch.num_rows)
    expected = one_by_one(judge, batch)
    expected_grads = gradients(judge, (expected * weights).sum())
    for plan in ("shared_prefix", "packed", "padded"):
        found = sequence_scores(judge, batch, plan=plan).squeeze(1)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=2e-5)
        grads = gradients(judge, (found * weights).sum())
        for part in ("vision", "language"):
            names = [name for name in expected_grads if any(word in name for word in VISION) == (part == "vision")]
            largest = max(float(expected_grads[name].abs().max()) for name in names)
            assert largest > 1e-4, f"{family}: no gradient reaches the {part} part"
            worst = max(float((grads[name] - expected_grads[name]).abs().max()) for name in names)
            assert worst < 1e-4 * largest, f"{family}, {plan}, {part}: {worst} of {largest}"
    verdict = verdict_of(judge)
    assert (verdict.reasons, verdict.image_reasons, verdict.own_logits) == ({}, {}, False)


def test_a_family_that_is_read_wrongly_falls_back_to_padded_rows(monkeypatch):
    judge, batch = prepared("gemma3")
    rules = dataclasses.replace(image_rules(judge), has_blocks=False)
    for module in (forward, selfcheck):
        monkeypatch.setattr(module, "image_rules", lambda model: rules)
    verdict = verdict_of(judge)
    assert set(verdict.image_reasons) == {"shared_prefix", "packed"}
    assert verdict.reasons == {}
    found = sequence_scores(judge, batch).squeeze(1)
    torch.testing.assert_close(found, one_by_one(judge, batch), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_language_model_becomes_a_reward_model_whose_files_load_again(family, tmp_path, monkeypatch):
    forget_classifiers(monkeypatch)
    model, _ = tiny_vlm(family)
    model.save_pretrained(tmp_path / "vlm")
    judge = load_reward_model(tmp_path / "vlm", seed=0)
    body = judge.base_model.state_dict()
    assert all(torch.equal(weight, body[name]) for name, weight in model.base_model.state_dict().items())
    judge.save_pretrained(tmp_path / "judge")
    names, of_judge = (set(load_file(tmp_path / name / "model.safetensors")) for name in ("vlm", "judge"))
    assert of_judge - {"score.weight"} == {name for name in names if "lm_head" not in name}
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    assert (type(again), again.config.num_labels) == (type(judge), 1)
    loaded = again.state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in judge.state_dict().items())


def test_files_without_some_weights_of_the_body_are_refused(tmp_path):
    model, _ = tiny_vlm("llava")
    weights = model.state_dict()
    del weights["model.language_model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match=r"lacks weights of a LlavaForSequenceClassification: model\.language_model"):
        load_reward_model(tmp_path)


def test_a_family_without_a_body_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="Llama4ForConditionalGeneration, from which no reward model can be made"):
        add_classifier(Llama4Config())


def test_a_critic_of_a_vision_language_model_reads_images_in_every_plan(monkeypatch):
    forget_classifiers(monkeypatch)
    policy, processor = tiny_vlm("llava")
    batch = example_batch(ImageReader(processor))
    set_image_example(policy, batch)
    model = value_model(policy)
    model.score.weight.data.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
    flat, padded = (ModelCritic(model, plan=plan).frozen_values(batch, max_tokens=None) for plan in ("auto", "padded"))
    torch.testing.assert_close(flat, padded, rtol=1e-4, atol=2e-5)
    assert float(flat.std()) > 0.1
