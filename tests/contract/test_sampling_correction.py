"""The loss of completions that another policy sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl.generation.local.generator import LocalGenerator
from prefrl.losses.policy.off_policy import importance_weights
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.types import Completion
from tests.contract.cases import ArrivingGenerator, ArrivingGroups, make_trainer, relative_difference, update_of

# Of the sampler's log-probs above the policy's, for the tokens of a completion in turn.
OFFSETS = (0.0, -0.4, 0.9, 0.1, -1.5)


class OtherSampler(ArrivingGenerator):
    """Reports log-probs as a sampler would that is not the policy."""

    def start(self, prompts: Any, sampling: Any, *, seeds: Any) -> ArrivingGroups:
        arriving = super().start(prompts, sampling, seeds=seeds)
        arriving.groups = [(number, [shifted(c) for c in group]) for number, group in arriving.groups]
        return arriving


def shifted(completion: Completion) -> Completion:
    logprobs = [value + OFFSETS[i % len(OFFSETS)] for i, value in enumerate(completion.logprobs)]
    return Completion(
        completion.token_ids, completion.finish_reason, logprobs, completion.trainable, completion.policy_versions
    )


def trainer_of(tmp_path: Path, **options: Any) -> OnlineTrainer:
    trainer = make_trainer("grpo", tmp_path, arrival=0, use_vllm=True, beta=0.5, **options)
    assert isinstance(trainer, OnlineTrainer)
    assert isinstance(trainer.generator, ArrivingGenerator)
    trainer.generator = OtherSampler(trainer.generator.local, order_seed=0)
    with torch.no_grad():  # away from the reference: the KL term, which is not weighed, has a gradient
        trainer.policy.get_input_embeddings().weight.mul_(1.1)
    return trainer


def last(trainer: OnlineTrainer, name: str) -> float:
    return next(float(entry[name]) for entry in reversed(trainer.state.log_history) if name in entry)


def expected_weights(trainer: OnlineTrainer, **arguments: Any) -> Iterator[torch.Tensor]:
    """The weights of each row, from the offsets alone."""
    for minibatch in trainer.buffer.minibatches:
        for batch in minibatch.micro_batches:
            for length in batch.response_lengths:
                offsets = torch.tensor([OFFSETS[i % len(OFFSETS)] for i in range(length)])
                index = torch.zeros(length, dtype=torch.long)
                yield importance_weights(-offsets, torch.ones(length).bool(), index, 1, **arguments).weights


@pytest.mark.parametrize(
    ("mode", "level", "bound"),
    [
        ("token_truncate", "token", "truncate"),
        ("token_mask", "token", "mask"),
        ("sequence_truncate", "sequence", "truncate"),
        ("sequence_mask", "sequence", "mask"),
        ("geometric_truncate", "geometric", "truncate"),
        ("geometric_mask", "geometric", "mask"),
    ],
)
def test_a_token_weighs_policy_over_sampler(tmp_path: Path, mode: str, level: str, bound: str) -> None:
    """The gradient is that of advantages that were multiplied by the weights by hand."""
    bounds = {"vllm_importance_sampling_kwargs": {"clip_max": 1.3, "clip_min": 0.6}}
    corrected = trainer_of(tmp_path / "corrected", vllm_importance_sampling_mode=mode, **bounds)
    update = update_of(corrected)
    weights = list(expected_weights(corrected, level=level, bound=bound, low=0.6, high=1.3))
    assert any(float((row - 1).abs().max()) > 0.05 for row in weights)

    by_hand = trainer_of(tmp_path / "by_hand", vllm_importance_sampling_correction=False)
    original = by_hand.cut

    def weigh(batch: Any, rows: int) -> Any:
        return original(batch.replace(advantages=batch.advantages * torch.cat(weights)), rows)

    by_hand.cut = weigh  # type: ignore[method-assign]
    assert relative_difference(update_of(by_hand), update) < 1e-4


def test_statistics_are_of_the_ratios_before_any_bound(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_kwargs={"clip_max": 1.2}
    )
    trainer.train()
    batches = [batch for minibatch in trainer.buffer.minibatches for batch in minibatch.micro_batches]
    offsets = torch.tensor([OFFSETS[i % 5] for b in batches for length in b.response_lengths for i in range(length)])
    ratios = (-offsets).exp()
    assert last(trainer, "sampling/sampling_logp_difference/mean") == pytest.approx(
        float(offsets.abs().mean()), rel=1e-4
    )
    assert last(trainer, "sampling/sampling_logp_difference/max") == pytest.approx(1.5, rel=1e-4)
    assert last(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert last(trainer, "sampling/importance_sampling_ratio/min") == pytest.approx(float(ratios.min()), rel=1e-4)
    assert last(trainer, "sampling/importance_sampling_ratio/max") == pytest.approx(float(ratios.max()), rel=1e-4)
    assert last(trainer, "sampling/clipped_share") == pytest.approx(float((ratios > 1.2).float().mean()), rel=1e-4)
    effective = float(ratios.sum() ** 2 / (len(ratios) * ratios.square().sum()))
    assert last(trainer, "sampling/effective_sample_size") == pytest.approx(effective, rel=1e-4)


def test_a_fresh_minibatch_needs_no_pass_for_old_logprobs(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.train()  # the check of the first use is over
    passes: list[bool] = []

    def note(*_: Any) -> None:
        if not torch.is_inference_mode_enabled():  # as it is while sampling
            passes.append(torch.is_grad_enabled())

    trainer.policy.register_forward_hook(note)
    trainer.train()
    assert passes == [True, True]


CUTS = {"temperature": 0.8, "top_k": 30, "top_p": 0.7, "min_p": 0.02, "repetition_penalty": 1.2}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared prompts": ("grpo", {"beta": 0.5}),
    "padded": ("grpo", {"beta": 0.5, "forward_plan": "padded"}),
    "full KL": ("grpo", {"beta": 0.5, "kl_estimator": "full"}),
    "turns": ("grpo", {"beta": 0.5, "talks": "forgetful"}),
    "images": ("grpo", {"beta": 0.5, "pictures": "qwen2_5_vl"}),
    "rloo": ("rloo", {}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {}),
    "ppo": ("ppo", {}),
}


@pytest.mark.parametrize(("algorithm", "options"), WAYS.values(), ids=WAYS.keys())
def test_truncated_samples_of_the_policy_itself_have_ratio_one(
    tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    trainer = make_trainer(algorithm, tmp_path, use_vllm=True, **CUTS, **options)
    assert isinstance(trainer, OnlineTrainer)
    assert trainer.reference is not None
    trainer.generator = LocalGenerator(trainer.policy, tokenizer=trainer.tokenizer)
    with torch.no_grad():  # so that distributions are neither flat nor one token; that of images has large weights
        trainer.policy.get_input_embeddings().weight.mul_(0.5 if "pictures" in options else 3)
    trainer.reference.mix(trainer.policy, 1.0)
    trainer.train()
    assert last(trainer, "sampling/sampling_logp_difference/max") < 1e-4
    assert last(trainer, "sampling/clipped_share") == 0
    assert last(trainer, "kl") == pytest.approx(0, abs=1e-6)
    assert 0 < last(trainer, "entropy") < math.log(CUTS["top_k"])


def test_log_probs_of_the_whole_softmax_are_a_choice_and_switch_the_correction_off(tmp_path: Path) -> None:
    trainer = make_trainer("grpo", tmp_path, arrival=0, use_vllm=True, truncated_logprobs="softmax", **CUTS)
    trainer.train()
    assert not any("sampling/clipped_share" in entry for entry in trainer.state.log_history)
    assert trainer.args.scoring_truncation is None
