"""What rewards say about the responses of each prompt: means, pass@k, maj@k and best@k, for each source of prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from prefrl.printable import printable
from prefrl.rewards.at_k import PromptSamples, at_k_metrics, mean_interval, share_interval

__all__ = ["ALL", "MeanWithInterval", "default_sizes", "evaluation_table", "summaries"]

ALL = "all"  # the name of the summary over all sources
_INTERVAL = ("_low", "_high")


@dataclass(frozen=True, slots=True)
class MeanWithInterval:
    """A mean over prompts with its 95% interval."""

    value: float
    low: float
    high: float


def default_sizes(prompts: Sequence[PromptSamples]) -> list[int]:
    """1, 2, 4, ... up to the most responses that a prompt has."""
    most = max((len(prompt.rewards) for prompt in prompts), default=1)
    return [2**i for i in range(max(most, 1).bit_length())]


def summaries(prompts: Sequence[PromptSamples], sizes: Sequence[int]) -> dict[str, dict[str, int | MeanWithInterval]]:
    """Source -> name -> a count or an estimate; first those over all sources, under the name `all`.

    `prompts` and `responses` are counts of what has a reward; `reward` is the mean over prompts of their mean reward,
    so a prompt with more responses counts no more. Without sources, there is only `all`.

    Args:
        prompts: The responses of each prompt that have a reward.
        sizes: The numbers k of pass@k, maj@k and best@k.
    """
    sources = sorted({prompt.source for prompt in prompts if prompt.source})
    found = {ALL: _summary(prompts, sizes)}
    for source in sources:
        found[source] = _summary([prompt for prompt in prompts if prompt.source == source], sizes)
    return found


def _summary(prompts: Sequence[PromptSamples], sizes: Sequence[int]) -> dict[str, int | MeanWithInterval]:
    scored = [replace(prompt, source="") for prompt in prompts if prompt.rewards]
    num_responses = sum(len(prompt.rewards) for prompt in scored)
    summary: dict[str, int | MeanWithInterval] = {"prompts": len(scored), "responses": num_responses}
    if not scored:
        return summary
    means = [math.fsum(prompt.rewards) / len(prompt.rewards) for prompt in scored]
    is_share = all(0 <= reward <= 1 for prompt in scored for reward in prompt.rewards)
    interval = share_interval(means, most_trials=num_responses) if is_share else mean_interval(means)
    summary["reward"] = MeanWithInterval(math.fsum(means) / len(means), *interval)
    values = at_k_metrics(scored, sizes)
    for name in values:
        if not name.endswith(_INTERVAL):
            summary[name] = MeanWithInterval(values[name], *(values[f"{name}{end}"] for end in _INTERVAL))
    return summary


def evaluation_table(found: dict[str, dict[str, int | MeanWithInterval]]) -> Table:
    """A row for each quantity and a column for each source."""
    table = Table(title="means over prompts, 95% intervals", min_width=36)
    table.add_column("")
    for source in found:
        table.add_column(Text(printable(source)), justify="right")
    for name in found[ALL]:
        table.add_row(name, *(_cell(summary.get(name)) for summary in found.values()))
    return table


def _cell(value: int | MeanWithInterval | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value.value:.3f}\n\\[{value.low:.3f}, {value.high:.3f}]"
