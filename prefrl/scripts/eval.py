"""`prefrl eval`: rewards of a model's responses to prompts, or of responses that a file holds.

What rewards say about the responses of each prompt: means, pass@k, maj@k and best@k, for each source of prompts.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefrl.errors import ConfigError, DataError, printable
from prefrl.options.fields import check_unset, opt
from prefrl.run.folder import check_writable
from prefrl.scripts.arguments.command import RewardEntry, reward_entries, weighted_rewards
from prefrl.scripts.arguments.datasets import FILES, ColumnArguments
from prefrl.scripts.declaration import command
from prefrl.scripts.sampling import (
    RESPONSES,
    SampledText,
    SamplingArguments,
    has_messages,
    load_rows,
    make_sampler,
    write_rows,
)

if TYPE_CHECKING:
    from prefrl.rewards.at_k import PromptSamples
    from prefrl.rewards.runner import RewardRunner

_SAMPLING = [field.name for field in dataclasses.fields(SamplingArguments) if field.name != "seed"]
# Under these names, rewards look for what is right.
_REFERENCES = ("answer", "solution", "ground_truth")
_ANSWERS = ("answer_parsed", "pred")  # columns of answers that rewards log
_BATCH = 256  # completions that are scored together


@dataclass
class EvalArguments(SamplingArguments, ColumnArguments):
    """The prompts, perhaps their responses, and the rewards."""

    GROUP: ClassVar[str] = "Data and rewards"

    dataset_name: str | None = opt(None, f"Dataset: a name on the Hub, a folder, or {FILES}.")
    dataset_split: str | None = opt(
        None, "Split, such as test[:100]. The default is all of a file, and otherwise test."
    )
    prompt_column: str = opt("prompt", "Column with the prompts, which are texts or lists of messages.")
    response_column: str = opt(
        RESPONSES, "Column with the responses, if no model is given: one text or a list of texts per prompt."
    )
    data_source_column: str = opt("data_source", "Column with the data source of each prompt, if there is one.")
    reference_column: str | None = opt(
        None,
        "Column with the correct answer, for rewards that read it in the columns answer, solution or ground_truth; a "
        "dot selects an entry of a column, as in reward_model.ground_truth. By default, the columns are used as they "
        "are.",
    )
    reward_funcs: list[RewardEntry] | None = opt(
        None, "Reward functions, as for training: built-in names, module.function, file.py:function, or graders."
    )
    reward_model_name_or_path: str | None = opt(None, "Sequence-classification model that gives one more reward.")
    reward_weights: list[float] | None = opt(None, "Weight of each reward. By default, each weight is 1.")
    k: list[int] | None = opt(
        None, "Values of k for pass@k, maj@k and best@k. The default is 1, 2, 4, ... up to the number of responses."
    )
    correct_reward: str | None = opt(
        None, "Name of the reward that decides what is correct. The default is the total reward."
    )
    threshold: float = opt(1.0, "Smallest value of that reward with which a response counts as correct.")
    answer_column: str | None = opt(
        None,
        "Column of the answers that maj@k compares, which a reward logs. The default is answer_parsed or pred, if a "
        "reward logs one of them.",
    )
    output_dir: str | None = opt(
        None, "Folder for metrics.json and completions.parquet. By default, nothing is written."
    )

    def __post_init__(self) -> None:
        rewards, weights = weighted_rewards(self.reward_funcs, self.reward_weights)
        self.reward_funcs = reward_entries(rewards)
        self.reward_weights = None if weights is None else [*weights]
        for part in (SamplingArguments, ColumnArguments):
            part.__post_init__(self)
        if self.dataset_name is None and Path(self.model_name_or_path or "").is_file():
            self.dataset_name, self.model_name_or_path = self.model_name_or_path, None  # prefrl eval responses.jsonl
        if self.dataset_name is None:
            raise ConfigError("dataset_name: not given. Set it to prompts, or to prompts with responses.")
        if not self.reward_funcs and self.reward_model_name_or_path is None:
            raise ConfigError(
                "reward_funcs=None: at least one reward is needed. Set reward_funcs to a built-in name, a grader or "
                "module:function, or set reward_model_name_or_path."
            )
        if self.samples:
            remedy = "Remove it, or the model."
            check_unset(self, "response_column", because="the model or server gives the responses", remedy=remedy)
        else:
            names = [name for name in _SAMPLING if name not in ("model_name_or_path", "server")]
            remedy = "Set model_name_or_path or server."
            check_unset(self, *names, because="the responses are read from the file", remedy=remedy)
        if any(size < 1 for size in self.k or ()):
            raise ConfigError(f"k={self.k}: must be at least 1 each")
        if self.samples:
            self.check_sizes(self.num_generations, "Raise num_generations.")

    def check_sizes(self, most: int, remedy: str = "Lower it.") -> None:
        """Raise ConfigError for a k for which no prompt has the responses; `most` of them has one."""
        if max(self.k or (0,)) > most:
            raise ConfigError(f"k={self.k}: a prompt has at most {most} responses. {remedy}")

    @property
    def samples(self) -> bool:
        """Whether a model or a server gives the responses."""
        return self.model_name_or_path is not None or self.server is not None


@dataclass(frozen=True, slots=True)
class _Scored:
    """The rewards of all responses, [P][n]."""

    totals: list[list[float]]  # NaN: no reward
    by_name: dict[str, list[list[float | None]]]
    logged: dict[str, list[list[Any]]]  # what rewards log


@command(
    "eval",
    EvalArguments,
    about="Score a model's responses to prompts, or the responses that a file holds.\n\nExamples:\n"
    "  prefrl eval runs/first questions.jsonl --reward_funcs numeric_reward --num_generations 4\n"
    "  prefrl eval answers.jsonl --reward_funcs numeric_reward",
    positional=("model_name_or_path", "dataset_name"),
)
def main(options: EvalArguments) -> int:
    """Sample if asked to, score, and report."""
    needed = options.prompt_column if options.samples else options.response_column
    rows = load_rows(str(options.dataset_name), options.dataset_split, column=needed, options=options)
    rewards = _rewards(options)  # before the model: it may be wrong, and the model is slow to load
    columns = _columns(rows, options)
    rewards.check_columns(columns)
    if options.output_dir is not None:
        check_writable(Path(options.output_dir))
    if (options.server is not None or not options.samples) and "completion_ids" in rewards.required:
        raise ConfigError(
            "reward_funcs: one of them needs completion_ids, but files and servers provide only texts. Remove it, or "
            "give model_name_or_path without server."
        )
    responses = _responses(rows, options)
    options.check_sizes(max(map(len, responses)))
    scored = _scored(rewards, rows, responses, columns, options)
    _report(options, rows, responses, scored)
    return 0


def _rewards(options: EvalArguments) -> RewardRunner:
    from prefrl.rewards.named import reward_by_name
    from prefrl.rewards.runner import RewardRunner

    sources: list[Any] = [reward_by_name(name) for name in options.reward_funcs or ()]
    if options.reward_model_name_or_path is not None:
        sources.append(options.reward_model_name_or_path)
    runner = RewardRunner(sources, weights=options.reward_weights)
    if options.correct_reward is not None and options.correct_reward not in runner.names:
        raise ConfigError(f"correct_reward={options.correct_reward!r}: must be one of {', '.join(runner.names)}")
    return runner


def _columns(rows: Sequence[Mapping[str, Any]], options: EvalArguments) -> dict[str, list[Any]]:
    """The columns for rewards, [P] each, under the names that they look for."""
    own = (options.prompt_column, options.response_column)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in own}
    if options.data_source_column in columns:
        columns["data_source"] = columns[options.data_source_column]
    if options.reference_column is not None:
        references = [_entry(row, options.reference_column) for row in rows]
        columns |= dict.fromkeys(_REFERENCES, references)
    return columns


def _entry(row: Mapping[str, Any], path: str) -> Any:
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            raise DataError(f"reference_column={path!r}: a row has no {name!r}. Columns: {', '.join(row)}")
        value = value[name]
    return value


def _responses(rows: Sequence[Mapping[str, Any]], options: EvalArguments) -> list[list[SampledText]]:
    if options.samples:
        with Console(stderr=True).status(f"Sampling {len(rows) * options.num_generations:,} responses"):
            prompts = [row[options.prompt_column] for row in rows]
            return make_sampler(options, needs_template=has_messages(prompts)).sample(prompts)
    return [
        [
            SampledText(text, "stop", None)
            for text in _texts(number, row[options.response_column], options.response_column)
        ]
        for number, row in enumerate(rows)
    ]


def _texts(number: int, cell: Any, column: str) -> list[str]:
    """The responses in a cell: a text, a list of texts, a conversation, or a list of conversations."""
    from prefrl.rewards.base import completion_text

    is_one = isinstance(cell, str) or (isinstance(cell, list) and bool(cell) and isinstance(cell[0], Mapping))
    responses = [cell] if is_one else cell
    if not isinstance(responses, list) or not all(isinstance(one, str | list) for one in responses):
        raise DataError(f"row {number}: column {column!r} is {cell!r:.200}; it must be a text, or a list of texts")
    return [completion_text(one) for one in responses]


def _scored(
    rewards: RewardRunner,
    rows: Sequence[Mapping[str, Any]],
    responses: Sequence[Sequence[SampledText]],
    columns: Mapping[str, Sequence[Any]],
    options: EvalArguments,
) -> _Scored:
    import torch  # not needed for --help

    from prefrl.losses.advantage.estimators import row_totals

    places = [(i, sample) for i, group in enumerate(responses) for sample in group]
    by_name: dict[str, list[float | None]] = {name: [] for name in rewards.names}
    logged: dict[str, list[Any]] = {}
    for start in range(0, len(places), _BATCH):
        batch = places[start : start + _BATCH]
        prompts = [rows[i].get(options.prompt_column, "") for i, _ in batch]
        scores = rewards.score(
            prompts,
            [_completion(prompt, sample.text) for prompt, (_, sample) in zip(prompts, batch, strict=True)],
            [sample.token_ids or [] for _, sample in batch],
            {name: [values[i] for i, _ in batch] for name, values in columns.items()},
            seed=options.seed,
        )
        for name, values in scores.by_name.items():
            by_name[name] += values
        for name in {*logged, *scores.extra}:
            before = logged.setdefault(name, [None] * start)
            before += scores.extra.get(name, [None] * len(batch))
    known = [[math.nan if one is None else one for one in row] for row in zip(*by_name.values(), strict=True)]
    weights = torch.tensor(rewards.weights, dtype=torch.float64)
    totals = row_totals(torch.tensor(known, dtype=torch.float64), weights).tolist()
    sizes = [len(group) for group in responses]
    return _Scored(
        _grouped(totals, sizes),
        {name: _grouped(values, sizes) for name, values in by_name.items()},
        {name: _grouped(values, sizes) for name, values in sorted(logged.items())},
    )


def _completion(prompt: Any, text: str) -> str | list[dict[str, Any]]:
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _grouped(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    remaining = iter(values)
    return [[next(remaining) for _ in range(size)] for size in sizes]


def _report(
    options: EvalArguments,
    rows: Sequence[Mapping[str, Any]],
    responses: Sequence[Sequence[SampledText]],
    scored: _Scored,
) -> None:

    prompts = _samples(options, rows, scored)
    found = summaries(prompts, options.k or default_sizes(prompts))
    console = Console()
    console.print(evaluation_table(found))
    num_unscored = sum(map(len, responses)) - int(found[ALL]["responses"])  # type: ignore[arg-type]  # a count
    if num_unscored:
        console.print(f"{num_unscored:,} responses have no reward: every reward returned None for them.")
    if options.output_dir is None:
        return
    folder = Path(options.output_dir)
    completions = [
        {
            **row,
            RESPONSES: [sample.text for sample in group],
            "reward": scored.totals[i],
            **{f"rewards/{name}": values[i] for name, values in scored.by_name.items()},
            **{name: values[i] for name, values in scored.logged.items()},
        }
        for i, (row, group) in enumerate(zip(rows, responses, strict=True))
    ]
    write_rows(folder / "completions.parquet", completions)
    metrics = {
        source: {name: value if isinstance(value, int) else dataclasses.asdict(value) for name, value in one.items()}
        for source, one in found.items()
    }
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2), encoding="utf-8")
    console.print(f"metrics.json and completions.parquet are in {folder}.")


def _samples(options: EvalArguments, rows: Sequence[Mapping[str, Any]], scored: _Scored) -> list[PromptSamples]:
    from prefrl.rewards.at_k import PromptSamples

    name = options.answer_column or next((column for column in _ANSWERS if column in scored.logged), None)
    if name is not None and name not in scored.logged:
        logged = ", ".join(scored.logged) or "nothing"
        raise ConfigError(f"answer_column={name!r}: no reward logs this column with log_extra; they log {logged}")
    decisive = scored.totals if options.correct_reward is None else scored.by_name[options.correct_reward]
    prompts = []
    for i, row in enumerate(rows):
        able = [j for j, total in enumerate(scored.totals[i]) if not math.isnan(total) and decisive[i][j] is not None]
        answers = [] if name is None else [scored.logged[name][i][j] for j in able]
        prompts.append(
            PromptSamples(
                str(row.get(options.data_source_column) or ""),
                tuple(scored.totals[i][j] for j in able),
                tuple(float(decisive[i][j] or 0.0) >= options.threshold for j in able),
                tuple("" if answer is None else str(answer) for answer in answers),
            )
        )
    return prompts


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
    """
    sources = sorted({prompt.source for prompt in prompts if prompt.source})
    found = {ALL: _summary(prompts, sizes)}
    for source in sources:
        found[source] = _summary([prompt for prompt in prompts if prompt.source == source], sizes)
    return found


def _summary(prompts: Sequence[PromptSamples], sizes: Sequence[int]) -> dict[str, int | MeanWithInterval]:
    from prefrl.rewards.at_k import at_k_metrics, mean_interval, share_interval

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
