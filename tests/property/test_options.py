"""Whatever is given to an option of a config: the config is made, or an error of prefrl's own says what is wrong."""

from __future__ import annotations

import dataclasses
import math
import warnings
from contextlib import suppress
from datetime import timedelta
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefrl.errors import ConfigError, DataError, NonFiniteError, PrefrlError
from prefrl.registry import REGISTRY
from tests.contract.cases import make_trainer

inf, nan = math.inf, math.nan

numbers = st.one_of(
    st.floats(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2, -2.5, 1e-30, 1e30, 1e308, 10**9, 10**18, 2**63, 10**400, 10**5000]),
    st.sampled_from([np.float32(1), np.int64(3), np.bool_(True), np.array([1.0, 2.0]), Fraction(1, 2), 1j]),
)
words = ["", "{", "{}", '{"a": 1}', "[1]", "\0", "\x1b[2J", "auto", "true", "1e-5", "no", "steps", "sgd", "beta"]
texts = st.one_of(st.sampled_from(words), st.text(max_size=5))
others = st.sampled_from([None, True, False, b"x", object(), object, len, Path("x"), range(3), ..., timedelta(1), {1}])
scalars = numbers | texts | others
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=2),
    st.tuples(scalars),
    st.dictionaries(st.one_of(texts, st.integers(), st.none()), scalars, max_size=2),
)


@cache
def options_of(algorithm):
    config_class = REGISTRY[algorithm].load_config()
    return [field.name for field in dataclasses.fields(config_class)]


def make_config(algorithm, folder, **options):
    usual = {"output_dir": str(folder), "use_cpu": True, "report_to": "none"}
    return REGISTRY[algorithm].load_config()(**usual | options)


chosen = st.sampled_from(sorted(REGISTRY)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from(options_of(name)))
)


@settings(derandomize=True, max_examples=400)
@example(("sft", "optim_args"), 3)
@example(("sft", "optim_args"), b"x")
@example(("sft", "optim"), [])
@example(("sft", "allow_resume_changes"), -2.5)
@example(("sft", "learning_rates"), {1: 2})
@example(("sft", "metric_for_best_model"), True)
@example(("sft", "eval_epochs"), 10**5000)
@example(("sft", "accelerator_config"), "x")
@example(("sft", "accelerator_config"), '{"a": 1}')
@example(("sft", "accelerator_config"), {"gradient_accumulation_kwargs": "x"})
@example(("sft", "deepspeed"), "[1]")
@example(("sft", "upload_to"), "\0")
@example(("grpo", "vllm_importance_sampling_correction"), [])
@example(("grpo", "use_adaptive_entropy"), object)
@given(chosen, values)
def test_any_value_of_any_option_makes_a_config_or_a_named_error(tmp_path_factory, option, value):
    algorithm, name = option
    with warnings.catch_warnings(), suppress(PrefrlError):
        warnings.simplefilter("ignore")  # of deprecated names
        make_config(algorithm, tmp_path_factory.getbasetemp(), **{name: value})


MOST = 2**63 - 1
LARGE_NUMBERS = {
    "logging_steps": MOST,
    "save_total_limit": MOST,
    "max_tokens_per_micro_batch": MOST,
    "nan_patience": MOST,
}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        pytest.param(
            "sft",
            {
                **LARGE_NUMBERS,
                **{
                    "on_nan": "skip",
                    "save_steps": MOST,
                    "max_length": 10**7,
                    "per_device_train_batch_size": 10**9,
                },
                **{"lr_scheduler_type": "linear", "warmup_steps": 10**9, "lr_decay_steps": MOST, "learning_rate": 0},
                **{"optim": "adamw_torch", "adam_epsilon": 1, "weight_decay": 1000, "max_grad_norm": inf},
            },
            id="sft, large",
        ),
        pytest.param(
            "sft",
            {
                **{"max_steps": -1, "num_train_epochs": 1e-6, "logging_steps": 1e-30, "save_steps": 1e-30},
                **{"optim": "adamw_torch", "adam_epsilon": 1e-30, "adam_beta1": 1e-300, "max_grad_value": 1e-30},
            },
            id="sft, small",
        ),
        pytest.param(
            "grpo",
            {
                **{"temperature": 100, "top_k": MOST, "min_p": 1e-300, "repetition_penalty": 0.01, "delta": 1e38},
                **{
                    "num_iterations": 10**6,
                    "max_prompt_length": 10**7,
                    "reward_timeout": 10**9,
                    "journal_keep": MOST,
                },
            },
            id="grpo, large",
        ),
        pytest.param(
            "grpo",
            {"temperature": 0.001, "top_p": 0.001, "repetition_penalty": 100, "epsilon": 0, "reward_weights": [1e-30]},
            id="grpo, small",
        ),
    ],
)
def test_the_most_extreme_values_that_are_accepted_train(tmp_path, algorithm, options):
    trainer = make_trainer(algorithm, tmp_path, rows=8, **{"max_steps": 2, "save_strategy": "steps"} | options)
    trainer.train()
    assert trainer.state.global_step in (1, 2)
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())


@pytest.mark.parametrize(
    ("algorithm", "options", "error"),
    [
        ("sft", {"learning_rate": 1e38}, NonFiniteError),
        ("dpo", {"beta": 1e38}, NonFiniteError),
        ("grpo", {"entropy_coef": 1e38}, NonFiniteError),
        ("grpo", {"generation_batch_size": 10**9}, DataError),
    ],
)
def test_values_that_cannot_train_end_in_a_named_error(tmp_path, algorithm, options, error):
    with pytest.raises(error):
        make_trainer(algorithm, tmp_path, rows=8, **{"max_steps": 2} | options).train()


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("sft", {"save_strategy": "steps", "save_steps": 1e308}, r"save_steps=1e\+308: must be a number <= "),
        ("sft", {"logging_steps": nan}, "logging_steps=nan: must be a number "),
        ("sft", {"adam_epsilon": 1e30}, r"adam_epsilon=1e\+30: must be a number >= 0 and <= 1$"),
        ("sft", {"weight_decay": 1e308}, r"weight_decay=1e\+308: must be a number >= 0 and <= 1000$"),
        ("sft", {"num_train_epochs": 1e-9}, "num_train_epochs=1e-09: must be a number >= 1e-06"),
        ("sft", {"warmup_steps": 10**18}, "warmup_steps=1000000000000000000: must be a number >= 0 and <= 10"),
        ("sft", {"max_length": 10**18}, "max_length=10*: must be a number >= 2 and <= 20000000$"),
        ("sft", {"gradient_accumulation_steps": 10**18}, "gradient_accumulation_steps=10*: must be a number >= 1 and"),
        (
            "sft",
            {"effective_batch_size": 10**9, "gradient_accumulation_steps": "auto"},
            "gradient_accumulation_steps=125000000: must be a number >= 1 and <= 100000$",
        ),
        ("sft", {"full_determinism": -2.5}, "full_determinism=-2.5: must be True or False"),
        ("sft", {"learning_rates": {"a": inf}}, r"learning_rates\['a'\]=inf: must be a number"),
        ("sft", {"metric_for_best_model": True}, "metric_for_best_model=True: must be a string, or None"),
        ("sft", {"eval_strategy": False}, "eval_strategy=False: must be one of 'no', 'steps', 'epoch'.* In YAML"),
        ("sft", {"output_dir": "a\0"}, "output_dir=.*: must not contain the character NUL"),
        ("sft", {"seed": 10**5000}, "seed=<int>: must be a number >= 0"),
        (
            "reward",
            {"center_rewards_coefficient": inf},
            r"center_rewards_coefficient=inf: must be a number > 0 and <=",
        ),
        ("dpo", {"loss_weights": [0.0]}, r"loss_weights=\[0.0\]: all are 0"),
        ("grpo", {"beta": inf}, "beta=inf: must be a number >= 0 and <= "),
        ("grpo", {"temperature": 1e-30}, "temperature=1e-30: must be a number >= 0.001 and <= 100"),
        ("grpo", {"temperature_eval": 1e-30}, "temperature_eval=1e-30: must be 0, .* or at least 0.001"),
        ("grpo", {"top_p": 1e-30}, "top_p=1e-30: must be a number >= 0.001"),
        ("grpo", {"repetition_penalty": 1e30}, "repetition_penalty=.*: must be a number >= 0.01 and <= 100"),
        ("grpo", {"max_completion_length": 10**9}, "max_completion_length=10*: must be a number >= 1 and <= 20000000"),
        ("grpo", {"reward_weights": [0.0]}, r"reward_weights=\[0.0\]: all rewards count 0"),
        ("grpo", {"reward_weights": [1.0, nan]}, r"reward_weights\[1\]=nan: must be a number"),
        ("grpo", {"sapo_temperature_pos": "x"}, "sapo_temperature_pos='x': must be a number, or None"),
    ],
)
def test_nonsense_is_told_by_the_config(tmp_path, algorithm, options, message):
    with pytest.raises(ConfigError, match=message):
        make_config(algorithm, tmp_path, **options)
