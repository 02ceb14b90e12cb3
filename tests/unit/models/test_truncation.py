"""Log-probs of truncated sampling are those of transformers' processors, whatever the plan, and of the sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefrl.data.collate import flat_batch
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.losses.truncation import Truncation
from prefrl.models.forward import token_logprobs
from prefrl.models.plans import Plan
from prefrl.models.scoring import prepare_for_scoring
from prefrl.types import TokenBatch
from tests.assets import ragged_batch, tiny_model

CUTS = {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
PLANS: list[Plan] = ["shared_prefix", "packed", "padded"]
MODELS = {
    "tied head": ("qwen2", {"tie_word_embeddings": True}),
    "softcap": ("gemma3_text", {"sliding_window": 8, "final_logit_softcapping": 5.0}),
}


def with_branches(batch: TokenBatch) -> TokenBatch:
    """The batch with a prompt that continues the first one, and the last row behind it."""
    number = batch.num_prompts
    return TokenBatch(
        prompt_ids=torch.cat([batch.prompt_ids, torch.tensor([7, 9, 7])]),
        prompt_lengths=(*batch.prompt_lengths, 3),
        prompt_parent=(*batch.prompt_parent, 0),
        prompt_index=(*batch.prompt_index[:-1], number),
        response_ids=batch.response_ids,
        response_lengths=batch.response_lengths,
        trainable=batch.trainable,
        group_index=batch.group_index,
    )


def processed(model: PreTrainedModel, batch: TokenBatch) -> list[torch.Tensor]:
    """For each trainable token, the log-prob from a plain forward of its row and the processors of transformers."""
    prompts, found = batch.prompt_ids.split(batch.prompt_lengths), []
    places = iter(batch.trainable.tolist())
    for number, response in enumerate(batch.response_ids.split(batch.response_lengths)):
        context = torch.cat([prompts[prompt] for prompt in batch.contexts[number]])
        text = torch.cat([context, response])
        logits = model(input_ids=text[None]).logits[0]
        for place in range(len(context), len(text)):
            if next(places):
                found.append(after_processors(logits[place - 1], text[:place], int(text[place])))
    return found


def after_processors(logits: torch.Tensor, before: torch.Tensor, token: int) -> torch.Tensor:
    history, scores = before.unique()[None], logits[None].float()
    scores = RepetitionPenaltyLogitsProcessor(CUTS["repetition_penalty"])(history, scores)
    scores = TemperatureLogitsWarper(0.7)(history, scores)
    kept = MinPLogitsWarper(CUTS["min_p"])(history, scores.detach())
    kept = TopPLogitsWarper(CUTS["top_p"])(history, TopKLogitsWarper(int(CUTS["top_k"]))(history, kept))
    is_kept = kept.isfinite()
    is_kept[0, token] = True
    return scores.masked_fill(~is_kept, -torch.inf).log_softmax(1)[0, token]


def gradient(model: PreTrainedModel, logprobs: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, len(logprobs))
    parameters = list(model.parameters())
    found = torch.autograd.grad((weights * logprobs).sum(), parameters, allow_unused=True)
    return torch.cat([torch.zeros(0) if g is None else g.flatten() for g in found])


@pytest.mark.parametrize("name", MODELS)
def test_every_plan_gives_the_numbers_of_the_processors(name: str) -> None:
    architecture, overrides = MODELS[name]
    model, batch = tiny_model(architecture, **overrides), with_branches(ragged_batch())
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)  # so that something is cut
    prepare_for_scoring(model)
    expected = torch.stack(processed(model, batch))
    expected_gradient = gradient(model, expected)
    cuts = Truncation(**CUTS)  # type: ignore[arg-type]
    for plan in PLANS:
        logprobs = token_logprobs(model, batch, temperature=0.7, truncation=cuts, plan=plan).logprobs[batch.trainable]
        torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)
        difference = gradient(model, logprobs) - expected_gradient
        assert difference.norm() <= 1e-4 * expected_gradient.norm()
    whole = token_logprobs(model, batch, temperature=0.7).logprobs[batch.trainable]
    assert float((whole - expected).abs().max().detach()) > 0.1


# peft 0.21 asks transformers 5.23 by the old name.
@pytest.mark.parametrize("has_adapter", [False, True], ids=["matrix", "adapter on the head"])
@pytest.mark.parametrize(
    "cuts",
    [{"top_k": 20, "top_p": 0.9}, {"top_p": 0.8}, {"min_p": 0.1, "top_p": 0.9}, {"repetition_penalty": 1.5}, CUTS],
    ids=["top_k and top_p", "top_p", "min_p and top_p", "penalty", "all"],
)
def test_the_trainer_scores_what_local_generation_reports(cuts: dict[str, Any], has_adapter: bool) -> None:
    model: Any = tiny_model(seed=1)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(4)
    if has_adapter:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(model, config).eval()
    prepare_for_scoring(model)
    prompts = [[5, 9, 5, 30], [8, 3], [40, 41, 42, 43, 44, 45]]
    sampling = SamplingParams(num_samples=4, max_tokens=25, temperature=0.7, **cuts)
    groups = LocalGenerator(model).generate(prompts, sampling, seeds=range(3))
    rows = [(prompt, sample) for prompt, group in zip(prompts, groups, strict=True) for sample in group]
    batch = flat_batch(
        [prompt for prompt, _ in rows],
        [sample.token_ids for _, sample in rows],
        groups=[number for number, group in enumerate(groups) for _ in group],
    )
    reported = torch.tensor([value for _, sample in rows for value in sample.logprobs])
    truncation = Truncation(**cuts)
    found = token_logprobs(model, batch, temperature=0.7, truncation=truncation, want=("entropy",))
    torch.testing.assert_close(found.logprobs.detach(), reported, atol=2e-5, rtol=0)
    whole = token_logprobs(model, batch, temperature=0.7, want=("entropy",))
    assert float((whole.logprobs - reported).abs().max().detach()) > 0.05
    if truncation.repetition_penalty == 1:
        assert (found.entropy <= whole.entropy + 1e-5).all()
