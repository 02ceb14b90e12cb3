"""Options of optimizers that are unknown, not allowed or without effect are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.training_args import OptimizerNames

from prefrl import PPOConfig, SFTConfig, distributed
from prefrl.errors import ConfigError
from prefrl.options.optimizers import OPTIMIZERS, REFUSED
from prefrl.trainer.loop import Loop
from prefrl.trainer.optimizers import discard_state, optimizer_class, works_under


def config(cls: Any = SFTConfig, **options: Any) -> Any:
    return cls(output_dir="unused", use_cpu=True, report_to="none", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": "adamm"}, "optim='adamm': unknown optimizer. Did you mean 'adam'?"),
        ({"optim": "lbfgs"}, "optim='lbfgs': it computes the loss several times in a step, through a closure"),
        ({"optim": "lamb_8bit"}, "Set optim='lamb', or 'adamw_8bit'"),
        ({"optim": "adamw"}, "transformers calls it 'adamw_torch_fused'"),
        (
            {"optim": "adam", "optim_args": "momentum=1"},
            "momentum=1 is not an argument of optim='adam'. Known: amsgrad",
        ),
        ({"optim": "adamax", "optim_args": "rho=1"}, "rho=1 is not an argument of optim='adamax'. It has none."),
        ({"optim": "adam", "optim_args": "amsgrad"}, "optim_args='amsgrad': must be pairs such as"),
        ({"optim": "adam", "optim_args": "amsgrad=1"}, "optim_args: amsgrad=1: must be True or False"),
        ({"optim": "asgd", "optim_args": "alpha=high"}, "optim_args: alpha='high': must be a number"),
        ({"optim": "rprop", "optim_args": "etas=2"}, r"optim_args: etas=2: must be numbers such as \(0.9, 0.99\)"),
        ({"optim": "muon", "optim_args": "adjust_lr_fn=mine"}, "Adjust learning rate function mine is not supported"),
        ({"optim": "sgd_8bit", "optim_args": "momentum=0.0"}, "SGD without momentum is not supported"),
        ({"optim": "adafactor", "optim_args": "relative_step=True"}, "It replaces learning_rate and its schedule"),
        ({"optim": "adafactor", "optim_args": "beta1=half"}, "optim_args: beta1='half': must be a number"),
        ({"optim_args": "centered=True"}, "'centered' has no effect because .* It passes on amsgrad"),
        ({"optim": "paged_adam", "weight_decay": 0.1}, "decouple it, as AdamW does.* or optim='paged_adamw_32bit'"),
        ({"learning_rates": {"(": 1.0}}, r"learning_rates: '\(' is not a valid regular expression"),
        ({"learning_rates": {"a": -1.0}}, r"learning_rates\['a'\]=-1.0: must be a number >= 0"),
        ({"regularization_lambda": 0.1}, "neither has an effect without the other"),
        ({"max_grad_value": 0.0}, "max_grad_value=0.0: must be a number > 0"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_a_wrong_option_of_the_critic_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic_optim_kwargs: lr=0\.1 is not known"):
        config(PPOConfig, critic_optim_kwargs={"lr": 0.1})


@pytest.mark.parametrize("name", ["soap", "lamb"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pytorch_optimizer", None)
    message = rf"optim='{name}' needs pytorch_optimizer: pip install 'prefrl\[optimizers\]'"
    with pytest.raises(ImportError, match=message):
        config(optim=name)


def test_names_are_neither_those_of_transformers_nor_refused() -> None:
    assert not OPTIMIZERS.keys() & {row.value for row in OptimizerNames}
    assert not REFUSED.keys() & ({row.value for row in OptimizerNames} | OPTIMIZERS.keys())


def test_arguments_reach_the_optimizer() -> None:
    args = config(optim="rprop", optim_args="etas=(0.4, 1.1), step_sizes=(1e-5, 1)", learning_rate=0.5)
    assert args.optim == "rprop"
    found = Loop.get_optimizer_cls_and_kwargs(args)
    assert found == (torch.optim.Rprop, {"lr": 0.5, "etas": (0.4, 1.1), "step_sizes": (1e-5, 1)})
    cls, arguments = Loop.get_optimizer_cls_and_kwargs(config(optim="adamw_torch", optim_args="amsgrad=True"))
    assert cls is torch.optim.AdamW
    assert arguments["amsgrad"] is True


def accelerator(backend: str, config: dict[str, Any] | None = None) -> Any:
    plugin = SimpleNamespace(deepspeed_config=config or {})
    return SimpleNamespace(
        distributed_type=SimpleNamespace(value=backend), state=SimpleNamespace(deepspeed_plugin=plugin)
    )


@pytest.mark.parametrize(
    ("name", "backend", "message"),
    [
        ("muon", "DEEPSPEED", "optim='muon' under ZeRO: .* needs whole weights. Use FSDP2 or DDP"),
        ("adafactor", "DEEPSPEED", "optim='adafactor' under ZeRO"),
        ("soap", "FSDP", "optim='soap' under FSDP2: .* Use DDP, or another optimizer"),
        ("adamw_8bit", "FSDP", "optim='adamw_8bit' under FSDP2: .* Use ZeRO or DDP"),
        ("adagrad", "DEEPSPEED", "optim='adagrad' under ZeRO: .* Use DDP"),
        ("adam", "DEEPSPEED", None),
        ("adam", "FSDP", None),
        ("muon", "FSDP", None),
        ("soap", "MULTI_GPU", None),
        ("adamw_torch_fused", "FSDP", None),
    ],
)
def test_an_optimizer_that_cannot_update_partitioned_weights_is_refused(
    name: str, backend: str, message: str | None
) -> None:
    if message is None:
        distributed.check_works_under(accelerator(backend), name, works_under(name))
        return
    with pytest.raises(ConfigError, match=message):
        distributed.check_works_under(accelerator(backend), name, works_under(name))


def test_options_that_deepspeed_would_ignore_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_grad_value under DeepSpeed, which updates within the backward pass"):
        distributed.check_gradients_seen(accelerator("DEEPSPEED"), "max_grad_value")
    distributed.check_gradients_seen(accelerator("FSDP"), "max_grad_value")
    with pytest.raises(ConfigError, match="optim have no effect: DeepSpeed's config has an optimizer"):
        distributed.check_chooses_optimizer(accelerator("DEEPSPEED", {"optimizer": {}}), "optim")
    distributed.check_chooses_optimizer(accelerator("DEEPSPEED"), "optim")


def test_a_norm_of_the_critic_is_among_the_options_that_need_gradients() -> None:
    options = {"max_grad_value": 0.1, "critic_optim_kwargs": {"max_grad_norm": 1.0}}
    assert config(PPOConfig, **options).set_on_gradients == ["max_grad_value", "critic_optim_kwargs: max_grad_norm"]
    assert config(PPOConfig).set_on_gradients == []


def test_a_warmup_of_the_critic_needs_a_scheduler_of_prefrl() -> None:
    assert config(PPOConfig, critic_optim_kwargs={"warmup_steps": 3}).has_own_schedule
    assert not config(PPOConfig, critic_optim_kwargs={"weight_decay": 0.1}).has_own_schedule


def test_a_state_that_could_not_be_read_is_not_saved() -> None:
    with pytest.raises(ConfigError, match="optim='sgd' without momentum under FSDP2"):
        distributed.check_state_read(accelerator("FSDP"), "sgd")
    distributed.check_state_read(accelerator("DEEPSPEED"), "sgd")


@pytest.mark.parametrize(
    "name", [*OPTIMIZERS, "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "adamw_bnb_8bit"]
)
def test_an_optimizer_without_its_state_goes_on_as_a_new_one(name: str) -> None:
    cls, arguments = optimizer_class(config(optim=name))
    weights = [torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8))]
    old = cls(weights, **arguments)
    take_steps(old, weights)
    discard_state(old)
    copies = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    take_steps(old, weights)
    take_steps(cls(copies, **arguments), copies)
    for weight, copy in zip(weights, copies, strict=True):
        assert torch.equal(weight, copy)


def take_steps(optimizer: Any, weights: list[torch.nn.Parameter]) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
