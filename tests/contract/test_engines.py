"""Losses and estimators in other engines: value and gradient are those of prefrl, and what is not possible is refused.

verl and torchtitan are packages of PyPI, in a folder of their own that `make` fills, and checked in processes that
find them there. prime-rl and NeMo-RL are not on PyPI: tests/stand_ins has the interfaces that they publish.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from prefrl.errors import ConfigError
from prefrl.integrations import of_tokens
from prefrl.losses.kl import KL_ESTIMATORS
from prefrl.losses.policy.losses import POLICY_LOSSES
from prefrl.losses.tensors import TokenRows, kl, reduction_of, sampling_weights
from tests.engines.inputs import (
    ADVANTAGE,
    LENGTH,
    LOGPROBS,
    LOSSES,
    MASK,
    OLD,
    REFERENCE,
    SAMPLING,
    WEIGHTS,
    check,
    expected,
    level_of,
)
from tests.pages import ROOT, marked_block

PACKAGES = Path(os.environ.get("PREFRL_ENGINES", ROOT / ".venv-engines"))
KERNELS = Path(os.environ.get("PREFRL_KERNELS", ROOT / ".venv-kernels"))


@pytest.mark.parametrize("engine", ["verl", "torchtitan"])
def test_an_engine_computes_our_losses(engine: str) -> None:
    """Triton is among the kernels; torchtitan imports it."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"), str(PACKAGES), str(KERNELS))))
    checks = ROOT / "tests" / "engines" / f"{engine}_checks.py"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.engines.missing",
        str(checks),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(ROOT / "tests" / "stand_ins")
    return


def test_a_loss_of_tokens_reads_one_token_alone() -> None:
    """Of the losses that are averaged over tokens, all but `vespo`: where rows end does not change them."""
    rows, one_row = TokenRows(MASK[MASK], TokenRows(MASK).row_index.view(MASK.shape)[MASK], len(MASK)), MASK[MASK]
    found = set()
    for name in LOSSES:
        flat = LOGPROBS[MASK], OLD[MASK], ADVANTAGE[MASK]
        split = of_tokens.policy_loss(name, rows, *flat, level=level_of(name)).loss
        if reduction_of(name) == "token":
            joined = of_tokens.token_losses(name, one_row, *flat, {})[1].loss
            found |= {name} if torch.equal(split, joined) else set()
    assert found == {*of_tokens.LOSSES}
    assert {name for name in POLICY_LOSSES if reduction_of(name) == "token"} - found == {"vespo", "clip_cov", "kl_cov"}


def test_the_table_of_the_docs_says_what_runs_where() -> None:
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|$", page, re.M)
    for engine, able in enumerate((LOSSES, of_tokens.LOSSES, LOSSES, of_tokens.LOSSES), 1):  # as in the head
        assert [(row[0], row[engine] == "yes") for row in rows] == [(name, name in able) for name in POLICY_LOSSES]


# prime-rl


def of_prime_rl(leaf: Tensor, **options: Any) -> Tensor:
    """As prime-rl calls a custom loss: sequences of a micro-batch end to end, divided by the tokens of the step."""
    module = import_module("prefrl.integrations.prime_rl")
    loss = import_module("prime_rl.trainer.rl.loss")
    inputs = loss.LossInputs(
        trainer_logprobs=leaf.flatten(),
        inference_logprobs=OLD.flatten(),
        ref_logprobs=options.pop("ref_logprobs", REFERENCE.flatten()),
        advantages=ADVANTAGE.flatten(),
        loss_mask=MASK.flatten(),
        loss_weights=options.pop("loss_weights", None),
    )
    output = module.policy_loss(inputs, **options)
    assert all(value.dim() == 0 and not value.requires_grad for value in output.metrics.values())
    return output.loss / MASK.sum()


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", of_tokens.LOSSES)
def test_every_loss_of_tokens_in_prime_rl_is_that_of_prefrl(name: str) -> None:
    leaf = LOGPROBS.clone().requires_grad_()
    found = of_prime_rl(leaf, loss_type=name, loss_weights=WEIGHTS.flatten())
    check(found, torch.autograd.grad(found, leaf)[0], expected(name, weights=WEIGHTS))


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_kl_form_in_prime_rl_is_that_of_prefrl(name: str) -> None:
    leaf, mine = LOGPROBS.clone().requires_grad_(), LOGPROBS.clone().requires_grad_()
    found = of_prime_rl(leaf, beta=0.5, kl_estimator=name)
    wanted, gradient = expected("dapo")
    term = 0.5 * kl(name, TokenRows(MASK), mine, REFERENCE).sum() / MASK.sum()
    gradient = gradient + torch.autograd.grad(term, mine)[0]
    check(found, torch.autograd.grad(found, leaf)[0], (wanted + term.detach(), gradient))


@pytest.mark.usefixtures("published")
def test_the_example_of_prime_rl_names_our_loss() -> None:
    section = tomllib.loads((ROOT / "examples/engines/prime_rl.toml").read_text(encoding="utf-8"))["trainer"]["loss"]
    module, _, function = section["import_path"].rpartition(".")
    assert section["type"] == "custom"
    assert getattr(import_module(module), function) is import_module("prefrl.integrations.prime_rl").policy_loss
    leaf = LOGPROBS.clone().requires_grad_()
    check(
        of_prime_rl(leaf, **section["kwargs"]),
        torch.autograd.grad(of_prime_rl(leaf, **section["kwargs"]), leaf)[0],
        expected("dapo", epsilon_high=0.28),
    )


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "grpo"}, "loss_type='grpo' with prime-rl: it is not averaged over tokens"),
        ({"loss_type": "vespo"}, "loss_type='vespo' with prime-rl: it sums over a row"),
        ({"level": "sequence"}, "level='sequence' with prime-rl: it packs sequences without their bounds"),
        ({"loss_type": "reinforce_"}, "loss_type='reinforce_' is not known. Did you mean 'reinforce'?"),
        ({"epsilon_hihg": 0.3}, "epsilon_hihg=0.3 is not a hyperparameter of loss_type='dapo'"),
        ({"beta": 0.1, "kl_estimator": "sequence"}, "kl_estimator='sequence' with prime-rl: allowed are k1, abs"),
        ({"beta": 0.1, "ref_logprobs": None}, "beta=0.1: this algorithm of prime-rl ships no reference log-probs"),
    ],
)
def test_what_prime_rl_cannot_compute_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        of_prime_rl(LOGPROBS, **options)
    assert text in str(error.value)


# NeMo-RL


def wide(values: Tensor, first: float = float("nan")) -> Tensor:
    """[B, S] as NeMo-RL has it: a first token, which nothing predicts, before the others."""
    return torch.cat([values.new_full((len(values), 1), first), values], 1)


def of_nemo_rl(loss: Any, leaf: Tensor, **more: Tensor) -> Tensor:
    """The sum over micro-batches of a row, of which the last is left out."""
    data = {
        "token_mask": wide(MASK.double(), 1.0),
        "sample_mask": torch.ones(len(MASK)),
        "advantages": wide(ADVANTAGE),
        "prev_logprobs": wide(OLD),
        "generation_logprobs": wide(SAMPLING),
        "reference_policy_logprobs": wide(REFERENCE),
        **more,
    }
    tokens, rows = MASK.sum(), torch.tensor(float(len(MASK)))
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(MASK)):
        part = {name: values[row : row + 1] for name, values in data.items()}
        found, metrics = loss(
            next_token_logprobs=leaf[row : row + 1], data=part, global_valid_seqs=rows, global_valid_toks=tokens
        )
        assert all(isinstance(value, float) for value in metrics.values())
        total = total + found
    left_out = {**{name: values[:1] for name, values in data.items()}, "sample_mask": torch.zeros(1)}
    found, _ = loss(leaf[:1], left_out, rows, tokens)
    return total + found


def nemo_rl(**options: Any) -> Any:
    return import_module("prefrl.integrations.nemo_rl").PolicyLoss(**options)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_in_nemo_rl_is_that_of_prefrl(name: str) -> None:
    interfaces = import_module("nemo_rl.algorithms.loss.interfaces")
    length = {"max_completion_length": LENGTH} if reduction_of(name) == "constant" else {}
    loss, leaf = nemo_rl(loss_type=name, level=level_of(name), **length), LOGPROBS.clone().requires_grad_()
    found = of_nemo_rl(loss, leaf)
    check(found, torch.autograd.grad(found, leaf)[0], expected(name))
    assert loss.input_type is interfaces.LossInputType.LOGPROB
    assert loss.loss_type.value == ("token_level" if reduction_of(name) == "token" else "sequence_level")


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("name", [*KL_ESTIMATORS, "sequence"])
def test_every_kl_form_in_nemo_rl_is_that_of_prefrl(name: str) -> None:
    leaf, mine = LOGPROBS.clone().requires_grad_(), LOGPROBS.clone().requires_grad_()
    found = of_nemo_rl(nemo_rl(loss_type="grpo", beta=0.5, kl_kwargs={"estimator": name}), leaf)
    sampler = {"sampling_logprobs": SAMPLING} if name == "sequence" else {}
    term = kl(name, TokenRows(MASK), mine, REFERENCE, **sampler) / MASK.sum(1, keepdim=True)
    term = 0.5 * term.sum() / len(MASK)
    wanted, gradient = expected("grpo")
    gradient = gradient + torch.autograd.grad(term, mine)[0]
    check(found, torch.autograd.grad(found, leaf)[0], (wanted + term.detach(), gradient))


@pytest.mark.usefixtures("published")
def test_the_example_of_nemo_rl_makes_a_loss() -> None:
    section = yaml.safe_load((ROOT / "examples/engines/nemo_rl.yaml").read_text(encoding="utf-8"))["loss_fn"]
    leaf, mine, rows = LOGPROBS.clone().requires_grad_(), LOGPROBS.clone().requires_grad_(), TokenRows(MASK)
    assert section["reference_policy_kl_penalty"] == section["prefrl"]["beta"]
    script: dict[str, Any] = {"config": SimpleNamespace(loss_fn=SimpleNamespace(**section))}
    exec(compile(marked_block("library.md", "nemo_rl import"), "<library>", "exec"), script)
    found = of_nemo_rl(script["loss_fn"], leaf)
    weights = sampling_weights("token_truncate", rows, OLD, SAMPLING, high=2.0).weights
    term = kl("k3", rows, mine, REFERENCE, sampling_logprobs=SAMPLING, bias_correction=True)
    term = 0.001 * (term / MASK.sum(1, keepdim=True)).sum() / len(MASK)
    wanted, gradient = expected("gmpo", weights=weights, epsilon=0.4)
    gradient = gradient + torch.autograd.grad(term, mine)[0]
    check(found, torch.autograd.grad(found, leaf)[0], (wanted + term.detach(), gradient))


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loss_type": "kl_cov"}, "loss_type='kl_cov' with NeMo-RL: it selects tokens of a whole generation batch"),
        ({"loss_type": "dr_grpo"}, "max_completion_length=None: loss_type='dr_grpo' divides by it"),
        ({"max_completion_length": 5}, "max_completion_length=5: loss_type='dr_grpo' divides by it"),
        ({"kl_kwargs": {"estimator": "k2"}}, "has no effect with beta=0.0. Set beta > 0."),
        ({"rho": 2.0}, "rho=2.0 is not a hyperparameter of loss_type='dapo'"),
    ],
)
def test_what_nemo_rl_cannot_compute_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        nemo_rl(**options)
    assert text in str(error.value)


@pytest.mark.usefixtures("published")
def test_data_that_nemo_rls_loss_cannot_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy.generation.top_k or top_p"):
        of_nemo_rl(nemo_rl(), LOGPROBS, curr_logprobs_keep_mask=MASK)
    with pytest.raises(ConfigError, match=r"beta=0.5: there are no log-probs of a reference"):
        nemo_rl(beta=0.5)(LOGPROBS, {"token_mask": wide(MASK.double())}, torch.tensor(3.0), torch.tensor(8.0))
