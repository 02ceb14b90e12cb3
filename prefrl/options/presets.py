"""Presets of GRPO: the options of published algorithms, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from types import MappingProxyType
from typing import Any

from prefrl.options.fields import FlatName, json_mapping


@dataclass(frozen=True, slots=True)
class Preset:
    """Options that turn GRPO into the algorithm of a paper. Learning rates are left to the user; so are batch sizes,
    but see `combined`.
    """

    options: Mapping[str, Any]
    source: str
    note: str = ""  # what else the paper does, or leaves open


_DEFAULT_ROWS = 8  # of per_device_train_batch_size
# A user who sets one of these decides how many completions a step has.
_SIZES = {
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "effective_batch_size",
    "generation_batch_size",
    "steps_per_generation",
    "num_generations",
}


def _preset(source: str, note: str = "", **options: Any) -> Preset:
    # Sample from the full distribution, as the papers do and as importance ratios require.
    return Preset(MappingProxyType({"temperature": 1.0, "top_p": 1.0, "top_k": None, **options}), source, note)


PRESETS: dict[str, Preset] = {
    "deepseekmath": _preset(
        "Shao et al. 2024, arXiv 2402.03300",
        "One update for each generation.",
        loss_type="grpo",
        scale_rewards="group",
        beta=0.04,
        num_generations=64,
    ),
    "dr_grpo": _preset(
        "Liu et al. 2025, arXiv 2503.20783",
        loss_type="dr_grpo",
        scale_rewards="none",
        beta=0.0,
    ),
    "dapo": _preset(
        "Yu et al. 2025, arXiv 2503.14476",
        "Its penalty for overlong completions is the reward prefrl.rewards.get_soft_overlong_punishment.",
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        scale_rewards="group",
        beta=0.0,
        dynamic_sampling=True,
        num_generations=16,
    ),
    "gspo": _preset(
        "Zheng et al. 2025, arXiv 2507.18071",
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
    ),
    "gspo_token": _preset(
        "Zheng et al. 2025, arXiv 2507.18071, section 4.3",
        loss_type="grpo",
        importance_sampling_level="sequence_token",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
    ),
    "cispo": _preset(
        "MiniMax 2025, arXiv 2506.13585",
        "The paper gives no upper bound; 4 is a common one.",
        loss_type="cispo",
        epsilon=1.0,
        epsilon_high=4.0,
        beta=0.0,
    ),
    "sapo": _preset("Gao et al. 2025, arXiv 2511.20347", loss_type="sapo", beta=0.0),
    "gmpo": _preset(
        "Zhao et al. 2025, arXiv 2507.20673",
        "Bounds of the log-ratio, as in the paper.",
        loss_type="gmpo",
        epsilon=0.4,
        epsilon_high=0.4,
        beta=0.0,
    ),
    "gpg": _preset("Chu et al. 2025, arXiv 2504.02546", loss_type="gpg", advantage_estimator="gpg", beta=0.0),
    "opo": _preset("Hao et al. 2025, arXiv 2505.23585", loss_type="dapo", advantage_estimator="opo", beta=0.0),
    "maxrl": _preset("Tajwar et al. 2026, arXiv 2602.02710", loss_type="dapo", advantage_estimator="maxrl", beta=0.0),
    "remax": _preset(
        "Li et al. 2023, arXiv 2310.10505",
        "One sampled completion of each prompt, in addition to the greedy one.",
        loss_type="reinforce",
        advantage_estimator="remax",
        num_generations=1,
        kl_in="reward",
        kl_estimator="k1",
        beta=0.01,
    ),
    "vespo": _preset("Shen et al. 2026, arXiv 2602.10693", loss_type="vespo", beta=0.0),
    "luspo": _preset(
        "LUSPO 2026, arXiv 2602.05261",
        loss_type="luspo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        beta=0.0,
    ),
    "clip_cov": _preset("Cui et al. 2025, arXiv 2505.22617", loss_type="clip_cov", beta=0.0),
    "kl_cov": _preset("Cui et al. 2025, arXiv 2505.22617", loss_type="kl_cov", beta=0.0),
    "high_entropy_tokens": _preset(
        "Wang et al. 2025, arXiv 2506.01939",
        "DAPO on the 20 % of the tokens that have the highest entropy.",
        loss_type="dapo",
        epsilon_high=0.28,
        top_entropy_quantile=0.2,
        beta=0.0,
        dynamic_sampling=True,
    ),
    "deepseek_v32": _preset(
        "DeepSeek-AI 2025, arXiv 2512.02556",
        "The paper gives neither beta nor the threshold; these are ours.",
        loss_type="grpo",
        beta=0.04,
        kl_kwargs={"bias_correction": True},
        loss_kwargs={"off_policy_mask_threshold": 1.0},
    ),
    "pods": _preset(
        "Xu et al. 2025, arXiv 2504.13818",
        loss_type="grpo",
        num_generations=16,
        rollout_selection="max_variance",
        selection_kwargs={"num_selected": 4},
        beta=0.0,
    ),
}


def combined(preset: Preset, options: Mapping[str, Any], flat_names: Mapping[str, FlatName]) -> dict[str, Any]:
    """The options of a preset and the user's, which take precedence, for keys of mappings as well.

    If the user sets no size, a step has whole groups of the preset: of 16 completions in two micro-batches, say.

    Args:
        preset: The preset.
        options: The user's.
        flat_names: Keywords that set keys of mappings.
    """
    both = {**preset.options, **options}
    size = preset.options.get("num_generations", 1)
    if size > 1 and _SIZES.isdisjoint(options):
        both["gradient_accumulation_steps"] = size // gcd(size, _DEFAULT_ROWS)
    for option, of_preset in preset.options.items():
        if isinstance(of_preset, Mapping):
            given = options.get(option) or {}
            keys = json_mapping(given, option) if isinstance(given, str) else given
            by_name = {place.key for name, place in flat_names.items() if name in options}
            both[option] = {key: value for key, value in of_preset.items() if key not in by_name} | keys
    return both
