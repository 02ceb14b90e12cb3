"""The defaults of the systems that prefrl's options come from, and the page that lists where ours differ."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import prefrl
from prefrl.options.params import kwargs_options

PAGE = Path(__file__).parents[2] / "docs/defaults.md"
# Config, system -> option, or key of an option -> its default there.
THEIRS: dict[tuple[str, str], dict[str, Any]] = {
    ("GRPOConfig", "TRL 0.16"): {
        "learning_rate": 1e-6,
        "remove_unused_columns": False,
        "model_init_kwargs": None,
        "max_prompt_length": 512,
        "num_generations": 8,
        "max_completion_length": 256,
        "ds3_gather_for_generation": True,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 50,
        "min_p": None,
        "repetition_penalty": 1.0,
        "cache_implementation": None,
        "use_vllm": False,
        "vllm_server_host": "0.0.0.0",
        "vllm_server_port": 8000,
        "vllm_server_timeout": 120.0,
        "vllm_guided_decoding_regex": None,
        "beta": 0.04,
        "num_iterations": 1,
        "epsilon": 0.2,
        "epsilon_high": None,
        "reward_weights": None,
        "scale_rewards": True,
        "sync_ref_model": False,
        "ref_model_mixup_alpha": 0.6,
        "ref_model_sync_steps": 512,
        "log_completions": False,
    },
    ("GRPOConfig", "verl"): {
        "entropy_coef": 0,
        "advantage_kwargs: advantage_epsilon": 1e-6,
        "loss_kwargs: temperature_pos": 1.0,
        "loss_kwargs: temperature_neg": 1.05,
        "loss_kwargs: ratio": 2e-4,  # of clip_cov and of kl_cov
        "loss_kwargs: lb": 1.0,
        "loss_kwargs: ub": 5.0,
        "loss_kwargs: coef": 0.1,
        "kl_kwargs: horizon": 10000,
        "selection_kwargs: power": 2.0,
    },
    ("GRPOConfig", "cosmos-rl"): {
        "loss_kwargs: rho": None,
        "loss_kwargs: positive_nll_coef": None,
        "loss_kwargs: min_filter_prefix_tokens": None,
        "dynamic_sampling_kwargs: max_tries": 10,
    },
    ("PPOConfig", "verl"): {"gamma": 1.0, "lam": 1.0, "num_iterations": 1, "critic_warmup": 0},
    ("DPOConfig", "Ludwig"): {"beta": 0.1, "label_smoothing": 0},
    ("KTOConfig", "Ludwig"): {"beta": 0.1},
    ("ORPOConfig", "Ludwig"): {"beta": 0.1},
    ("SFTConfig", "Ludwig"): {
        "early_stopping_patience": 5,
        "per_device_train_batch_size": "auto",
        "increase_batch_size_on_plateau": 0,
        "increase_batch_size_kwargs: patience": 5,
        "increase_batch_size_kwargs: rate": 2,
        "reduce_on_plateau": 0,
        "reduce_on_plateau_kwargs: patience": 10,
        "reduce_on_plateau_kwargs: factor": 0.1,
        "lr_scheduler_kwargs: pct_start": 0.3,
        "lr_scheduler_kwargs: div_factor": 25,
        "lr_scheduler_kwargs: final_div_factor": 1e4,
        "lr_scheduler_kwargs: decay_rate": 0.96,
        "lr_scheduler_kwargs: decay_steps": 10000,
        "model_soup_kwargs: top_k": 5,
    },
}


def ours(config: str, option: str) -> list[Any]:
    """The default of an option; of a key, that with each choice that has it."""
    config_class = getattr(prefrl, config)
    name, _, key = option.partition(": ")
    if not key:
        return [field.default for field in dataclasses.fields(config_class) if field.name == name]
    (mapping,) = [mapping for mapping in kwargs_options(config_class) if mapping.name == name]
    return [field.default for fields in mapping.keys().values() for field in fields if field.name == key]


def test_the_page_lists_exactly_the_defaults_that_differ_each_with_its_reason() -> None:
    known = {(config, option): ours(config, option) for (config, _), options in THEIRS.items() for option in options}
    assert [place for place, defaults in known.items() if not defaults] == []
    differing = [
        (config, option, f"`{value!r}` ({system})", f"`{default!r}`")
        for (config, system), options in THEIRS.items()
        for option, value in options.items()
        for default in dict.fromkeys(known[config, option])
        if default != value
    ]
    row = re.compile(r"^\| `(\w+)` \| `([\w: ]+)` \| (.+?) \| (.+?) \| (.+) \|$", re.M)
    rows = row.findall(PAGE.read_text(encoding="utf-8"))
    assert sorted(row[:4] for row in rows) == sorted(differing)
    assert all(reason.endswith(".") for *_, reason in rows)
