"""The sum of a policy loss and its further terms, and the weights that follow a measure."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from prefrl import GRPOConfig
from prefrl.errors import ConfigError
from prefrl.losses.kl import full_kl
from prefrl.losses.per_token import TokenScores
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.options.policy import EntropyParams
from prefrl.trainer.online.policy_objective import PolicyObjective
from prefrl.trainer.online.policy_terms import AdaptiveEntropy, AdaptiveKL, PolicyBatch


def batch_of(lengths: list[int], **fields: Any) -> PolicyBatch:
    """Rows of these lengths that answer the same prompt, all with advantage 2."""
    num_tokens = sum(lengths)
    values: dict[str, Any] = {
        "trainable": torch.ones(num_tokens, dtype=torch.bool),
        "sampling_logprobs": torch.full((num_tokens,), -1.0),
        "advantages": torch.full((num_tokens,), 2.0),
        "loss_scale": torch.ones(num_tokens),
        "cov_tokens": torch.zeros(num_tokens, dtype=torch.bool),
        "nll_weights": torch.zeros(num_tokens),
        "entropy_weights": torch.ones(num_tokens),
    }
    return PolicyBatch(
        prompt_ids=torch.tensor([5]),
        prompt_lengths=(1,),
        prompt_index=(0,) * len(lengths),
        response_ids=torch.arange(num_tokens),
        response_lengths=tuple(lengths),
        group_index=(0,) * len(lengths),
        **(values | fields),
    )


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_the_entropy_bonus_is_the_mean_over_tokens_for_every_loss(loss: str, tmp_path: Path) -> None:
    """Three micro-batches with 8 tokens, of which 2 have no loss: the others have a weight of 0.3 / 6 each."""
    level = "token" if "token" in POLICY_LOSSES[loss].levels else "sequence"
    options: dict[str, Any] = {"loss_type": loss, "importance_sampling_level": level, "entropy_coef": 0.3, "beta": 0.0}
    objective = PolicyObjective(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options))
    trainable = torch.tensor([True, True, True, True, False, True, False, True])
    batch = batch_of([1, 2, 5], trainable=trainable, entropy_weights=trainable.float())
    num_items = float(objective.row_items(batch).sum())
    batch = objective.prepared(batch, num_items=num_items)
    entropy = torch.linspace(0.1, 0.8, 8, requires_grad=True)
    for row, place in enumerate((slice(0, 1), slice(1, 3), slice(3, 8))):
        scores = TokenScores.of(batch.sampling_logprobs[place], entropy=entropy[place])
        (objective(batch.select([row]), scores).total / num_items).backward()
    torch.testing.assert_close(entropy.grad, -0.3 / 6 * trainable)


@pytest.mark.parametrize(
    ("loss", "level", "warns"),
    [
        ("dapo", "sequence", True),
        ("dr_grpo", "sequence_token", True),
        ("cispo", "sequence", True),
        ("cispo", "sequence_sum", False),  # the weight of the whole sequence, as in REINFORCE
        ("dapo", "token", False),
        ("grpo", "sequence", False),
        ("luspo", "sequence", False),
    ],
)
def test_a_ratio_of_sequences_in_a_sum_over_tokens_is_warned_of(
    loss: str, level: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, loss_type=loss, importance_sampling_level=level)
    PolicyObjective(args)
    assert ("a sequence counts as often as it has tokens" in caplog.text) is warns


def test_a_loss_of_the_ratio_to_the_sampler_is_not_corrected_again(tmp_path: Path) -> None:
    """-r A log pi of two tokens, r = policy / sampler, A = 2."""
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, use_vllm=True, beta=0.0, loss_type="aipo")
    logprobs, ratios = torch.tensor([-1.0, -2.0]), torch.tensor([1.5, 0.5])
    batch = batch_of([2], sampling_logprobs=logprobs - ratios.log())
    output = PolicyObjective(args)(batch, TokenScores.of(logprobs, entropy=torch.zeros(2)))
    assert output.total.item() == pytest.approx(1.5 * 2 * 1 + 0.5 * 2 * 2)


def test_both_kl_terms_are_added_with_the_weights_of_the_policy_loss(tmp_path: Path) -> None:
    """Of three tokens in two rows, with ratio 1: (-A log pi + 0.3 k3 of the reference + 0.7 KL of the teacher) / n."""
    options: dict[str, Any] = {"loss_type": "grpo", "beta": 0.3, "teacher_kl_coef": 0.7}
    objective = PolicyObjective(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options))
    assert objective.reference_needs == {"ref_logprobs", "teacher_logprobs", "ref_hidden"}
    logits, of_reference, of_teacher = (
        torch.randn(3, 6, dtype=torch.float64, generator=torch.manual_seed(seed)) for seed in range(3)
    )
    logits.requires_grad_()
    p, first, q = (each.log_softmax(1) for each in (logits, of_reference, of_teacher))
    ids = torch.tensor([[0], [5], [2]])
    logprobs, ref_logprobs = (each.gather(1, ids).squeeze(1) for each in (p, first))
    batch = batch_of([1, 2], ref_logprobs=ref_logprobs, teacher_logprobs=torch.zeros(3))
    scores = TokenScores.of(logprobs, entropy=torch.zeros(3), divergence=full_kl(p, q))
    output = objective(batch, scores)
    (found,) = torch.autograd.grad(output.total, logits, retain_graph=True)
    chosen = torch.nn.functional.one_hot(ids[:, 0], 6)
    kl = (p.exp() * (p - q)).sum(1, keepdim=True)
    d = (ref_logprobs - logprobs)[:, None]
    by_hand = (-2.0 + 0.3 * (1 - d.exp())) * (chosen - p.exp()) + 0.7 * p.exp() * (p - q - kl)
    torch.testing.assert_close(found, by_hand / torch.tensor([1.0, 2, 2])[:, None], rtol=1e-12, atol=1e-12)
    assert output.metrics["teacher_kl"].value() == pytest.approx(kl.mean().item(), rel=1e-6)
    assert output.metrics["kl"].value() == pytest.approx((d.exp() - 1 - d).mean().item(), rel=1e-6)


VERL = json.loads((Path(__file__).parents[2] / "golden" / "verl_kl_0_9_1.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 100 / 1000),
        (5.4, 1 - 0.1 * 100 / 1000),
        (60.0, 1 + 0.2 * 100 / 1000),
        (math.inf, 1 + 0.2 * 100 / 1000),
        (0.0, 1 - 0.2 * 100 / 1000),
        (-3.0, 1 - 0.2 * 100 / 1000),  # an estimate may be negative
    ],
)
def test_the_kl_weight_moves_in_proportion_to_the_error_up_to_a_fifth(kl, factor):
    controller = AdaptiveKL(0.2, 6.0, 1000)
    controller.update(kl, 100)
    assert controller.value == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_kl_weight_is_that_of_verl():
    stored = VERL["adaptive_kl"]
    controller = AdaptiveKL(stored["value"], stored["target"], stored["horizon"])
    for kl, num_completions, value in stored["updates"]:
        controller.update(kl, num_completions)
        assert controller.value == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("name", ["value", "target", "horizon"])
@pytest.mark.parametrize("number", [0.0, -1.0, math.inf, math.nan])
def test_a_number_of_the_kl_weight_that_is_not_positive_is_refused(name, number):
    arguments = {"value": 0.1, "target": 6.0, "horizon": 1000} | {name: number}
    with pytest.raises(ConfigError, match=f"{name}={number} of an adaptive KL weight: needs to be positive"):
        AdaptiveKL(**arguments)


def test_more_completions_at_once_than_the_horizon_bears_are_refused():
    controller = AdaptiveKL(0.1, 6.0, 10)
    controller.update(0.0, 49)
    assert controller.value == pytest.approx(0.1 * 0.02)
    with pytest.raises(ConfigError, match=r"horizon=10 .* the 50 completions of an update"):
        controller.update(0.0, 50)


def test_nan_is_refused_and_changes_nothing():
    kl, entropy = (
        AdaptiveKL(0.1, 6.0, 1000),
        AdaptiveEntropy(0.1, EntropyParams(min=0.0, max=1.0, delta=0.01, target=0.5)),
    )
    with pytest.raises(ValueError, match="kl=nan"):
        kl.update(math.nan, 8)
    with pytest.raises(ValueError, match="entropy=nan"):
        entropy.update(math.nan)
    assert kl.value == 0.1
    assert entropy.coef == 0.1


def test_the_entropy_coefficient_rises_and_is_applied_at_and_below_the_target_alone():
    controller = AdaptiveEntropy(0.02, EntropyParams(min=0.0, max=0.05, delta=0.01, target=0.5))
    assert (controller.coef, controller.value) == (0.02, 0.0)  # no entropy is known yet
    seen = []
    for entropy in (0.4, 0.5, 0.6, 0.7, 0.1):
        controller.update(entropy)
        seen.append((controller.coef, controller.value))
    assert seen == [
        (pytest.approx(0.03), pytest.approx(0.03)),
        (pytest.approx(0.04), pytest.approx(0.04)),
        (pytest.approx(0.03), 0.0),
        (pytest.approx(0.02), 0.0),
        (pytest.approx(0.03), pytest.approx(0.03)),
    ]


def test_the_entropy_coefficient_stays_within_its_bounds():
    controller = AdaptiveEntropy(0.02, EntropyParams(min=0.015, max=0.035, delta=0.01, target=0.5))
    coefs = []
    for entropy in (0.1, 0.1, 0.1, 0.9, 0.9, 0.9):
        controller.update(entropy)
        coefs.append(controller.coef)
    assert coefs == pytest.approx([0.03, 0.035, 0.035, 0.025, 0.015, 0.015])
    assert coefs[1] == 0.035
    assert coefs[-1] == 0.015


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coef": -0.1, "min": -0.2}, "min=-0.2: must be a number >= 0"),
        ({"coef": 0.005}, r"coef=0.005 of an adaptive entropy bonus: must be in 0.01 \.\. 1.0"),
        ({"max": 0.05}, r"coef=0.1 .* must be in 0.01 \.\. 0.05"),
        ({"max": math.inf}, "max=inf: must be a number > 0 and <= 1e\\+38"),
        ({"delta": 0.0}, "delta=0.0: must be a number > 0"),
    ],
)
def test_bounds_of_the_entropy_coefficient_that_cannot_be_are_refused(changes, message):
    values = {"coef": 0.1, "min": 0.01, "max": 1.0, "delta": 0.01, "target": 0.5} | changes
    with pytest.raises(ConfigError, match=message):
        AdaptiveEntropy(values.pop("coef"), EntropyParams(**values))


def test_states_survive_json_bit_by_bit():
    kl, entropy = (
        AdaptiveKL(0.1, 6.0, 1000),
        AdaptiveEntropy(0.1, EntropyParams(min=0.0, max=1.0, delta=0.001, target=0.5)),
    )
    for i in range(20):
        kl.update(6.0 + math.sin(i), 7)
        entropy.update(0.4 + 0.1 * math.sin(i))
    others = AdaptiveKL(0.5, 6.0, 1000), AdaptiveEntropy(0.5, EntropyParams(min=0.0, max=1.0, delta=0.001, target=0.5))
    for controller, other in zip((kl, entropy), others, strict=True):
        state = controller.state_dict()
        assert all(type(number) is float for number in state.values())
        other.load_state_dict(json.loads(json.dumps(state, allow_nan=False)))
        assert [n.hex() for n in other.state_dict().values()] == [n.hex() for n in state.values()]
        assert other.value.hex() == controller.value.hex()


def test_a_state_before_the_first_update_survives_json():
    used, fresh = (AdaptiveEntropy(0.1, EntropyParams(min=0.0, max=1.0, delta=0.01, target=0.5)) for _ in range(2))
    used.update(0.2)
    used.load_state_dict(json.loads(json.dumps(fresh.state_dict(), allow_nan=False)))
    assert (used.coef, used.value) == (0.1, 0.0)
