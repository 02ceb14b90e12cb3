"""A teacher of policy-gradient trainers: a KL term beside that of the reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from prefrl.errors import ConfigError
from prefrl.losses.per_token import row_sums
from prefrl.trainer.online.policy_terms import PolicyBatch
from tests.assets import tiny_model
from tests.contract.cases import make_trainer, stopping_model

TAUGHT: dict[str, Any] = {"teacher_kl_coef": 0.7, "beta": 0.0, "reward": None}
Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]  # of log p and log q, [n, V], and the tokens


def of_tokens(estimate: Callable[[Tensor], Tensor]) -> Estimate:
    """From log p - log q of the tokens."""
    return lambda p, q, ids: estimate((p - q).gather(1, ids[:, None]).squeeze(1))


def sequence(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """On samples of the policy: the gradient of each token's log-prob times the later differences, itself included."""
    chosen, other = (each.gather(1, ids[:, None]).squeeze(1) for each in (p, q))
    later = (chosen - other).detach().flip(0).cumsum(0).flip(0)
    return (chosen - other).detach() + later * (chosen - chosen.detach())


K3 = of_tokens(lambda d: (-d).exp() - 1 + d)
ESTIMATES: dict[str | None, Estimate] = {
    None: lambda p, q, _: (p.exp() * (p - q)).sum(1),
    "k2": of_tokens(lambda d: d.square() / 2),
    "sequence": sequence,
}


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("estimator", ESTIMATES, ids=str)
def test_loss_and_gradient_are_the_sum_of_both_terms(estimator: str | None, beta: float, tmp_path: Path) -> None:
    model, teacher = stopping_model().double(), tiny_model(seed=9, hidden_size=24).double()
    kwargs = {} if estimator is None else {"teacher_kl_kwargs": {"estimator": estimator}}
    options = {**TAUGHT, "beta": beta, **kwargs, "max_completion_length": 6}
    trainer = make_trainer("grpo", tmp_path, model=model, teacher_model=teacher, **options)
    start = stopping_model().double()
    with torch.no_grad():  # away from the reference, where the gradient of k3 is 0
        for parameter in trainer.policy.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(parameter.numel()))
    trainer.create_optimizer()
    items, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    (batch,) = cast("list[PolicyBatch]", items[-1].micro_batches)
    output = trainer.loss(trainer.model, batch)
    found = torch.autograd.grad(output.total, list(trainer.policy.parameters()))

    def log_probs(other: nn.Module, prompt: Tensor, ids: Tensor) -> Tensor:
        logits: Tensor = other(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(1)

    prompts = torch.split(batch.prompt_ids, list(batch.prompt_lengths))
    total, of_teacher = torch.zeros((), dtype=torch.float64), 0.0
    for row, ids in enumerate(torch.split(batch.response_ids, list(batch.row_lengths))):
        p, q, first = (log_probs(each, prompts[batch.prompt_index[row]], ids) for each in (model, teacher, start))
        kl = ESTIMATES[estimator](p, q.detach(), ids).sum()
        total, of_teacher = total + 0.7 * kl + beta * K3(p, first.detach(), ids).sum(), of_teacher + kl.item()
    expected = torch.autograd.grad(total, list(trainer.policy.parameters()))
    assert batch.num_tokens > 20
    assert output.metrics["teacher_kl"].value() == pytest.approx(of_teacher / batch.num_tokens, rel=1e-9)
    assert ("kl" in output.metrics) is (beta > 0)
    assert output.total.item() == pytest.approx(total.item(), rel=1e-9)
    one, other = (torch.cat([gradient.flatten() for gradient in each]) for each in (found, expected))
    assert (one - other).norm() < 1e-5 * other.norm()  # norms of the model are computed in float32


@pytest.mark.parametrize(("algorithm", "options"), [("grpo", {}), ("ppo", {"teacher_kl_kwargs": {"in_reward": True}})])
def test_a_teacher_that_is_the_student_teaches_nothing(
    algorithm: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Nor does a run without rewards have a signal to warn of."""
    trainer = make_trainer(algorithm, tmp_path, teacher_model=stopping_model(), **TAUGHT, **options)
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "teacher_kl" in entry]
    assert logged["teacher_kl"] == pytest.approx(0.0, abs=1e-6)
    assert "time/teacher_s" in logged
    assert not [name for name in logged if name.startswith(("reward", "health", "kl"))]
    if algorithm == "grpo":
        assert logged["grad_norm"] < 1e-4


def test_penalties_alone_teach(tmp_path: Path) -> None:
    """The tokens that the teacher finds likelier than the policy does become likelier: a policy gradient."""
    options = {**TAUGHT, "teacher_kl_kwargs": {"in_reward": True}, "scale_rewards": "none", "loss_type": "dr_grpo"}
    trainer = make_trainer("grpo", tmp_path, **options)
    trainer.create_optimizer()
    items, _ = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
    (batch,) = cast("list[PolicyBatch]", items[-1].micro_batches)
    scores = trainer.scorer.needed(batch, {"old_logprobs", "teacher_logprobs"}, rows_per_pass=8)
    differences = scores.old_logprobs - scores.teacher_logprobs
    sums = row_sums(differences, batch.trainable, batch.row_index, batch.num_rows)
    groups = torch.tensor(batch.group_index)
    centered = torch.stack([total - sums[groups == group].mean() for total, group in zip(sums, groups, strict=True)])
    torch.testing.assert_close(batch.advantages, -0.7 * centered[batch.row_index], rtol=1e-4, atol=1e-4)
    assert batch.advantages.abs().max() > 0.1


def test_a_run_does_not_resume_with_another_teacher(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, **TAUGHT, "beta": 0.1}
    make_trainer("grpo", tmp_path, **options).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ConfigError, match="the checkpoint was trained against another teacher: the fingerprint"):
        make_trainer("grpo", tmp_path, **options, teacher_model=tiny_model(seed=10)).train(checkpoint)
    whole = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    resumed = make_trainer("grpo", tmp_path, **options)
    resumed.train(checkpoint)
    assert all(torch.equal(value, whole[key]) for key, value in resumed.model.state_dict().items() if key in whole)


TEACHER = tiny_model(seed=9)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"teacher_kl_coef": 0.5, "teacher_model": None}, "teacher_model=None: teacher_kl_coef=0.5 needs a teach"),
    ("ppo", {"teacher_model": TEACHER}, "teacher_model has no effect because teacher_kl_coef=0.0. Set teacher_kl"),
    ("rloo", {"teacher_model_name_or_path": "m"}, "teacher_model_name_or_path='m' has no effect because teacher_kl_"),
    ("grpo", {"teacher_kl_coef": 0.5, "teacher_model_name_or_path": "m"}, "the argument teacher_model: both name the"),
    (
        "grpo",
        {"teacher_kl_coef": 0.5, "teacher_model": tiny_model(vocab_size=64)},
        "teacher_model has a vocabulary of 64 tokens, but the model has 128",
    ),
    (
        "grpo",
        {"teacher_kl_coef": 0.5, "teacher_model_init_kwargs": '{"revision": "a"}'},
        "teacher_model_init_kwargs={'revision': 'a'} has no effect because teacher_model is an instance",
    ),
    ("online_dpo", {"teacher_model": TEACHER}, "teacher_model has no effect because OnlineDPOTrainer has no KL term"),
    ("ppo", TAUGHT, "reward_funcs=None: must be a reward"),
    ("grpo", {**TAUGHT, "dynamic_sampling": True}, "dynamic_sampling=True has no effect because there are no rewards"),
    ("grpo", {**TAUGHT, "advantage_estimator": "remax"}, "advantage_estimator='remax' without rewards: it compares"),
]


@pytest.mark.parametrize(("algorithm", "options", "message"), REFUSED, ids=[message[:50] for *_, message in REFUSED])
def test_what_cannot_be_is_refused(algorithm: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_trainer(algorithm, tmp_path, **options)


def test_the_policy_is_not_its_own_teacher(tmp_path: Path) -> None:
    model = stopping_model()
    with pytest.raises(
        ConfigError, match=r"teacher_model is the model that is trained.*Load teacher_model separately"
    ):
        make_trainer("grpo", tmp_path, model=model, teacher_model=model, **TAUGHT)
