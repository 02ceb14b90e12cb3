"""What is told of a batch of rollouts: metrics, a table, what trackers get, and that it says nothing.

Completions are the words of a model: the terminal takes no commands from them, and no text is too long to be shown.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefrl import distributed
from prefrl.errors import RewardError, printable, reason_of
from prefrl.metrics import Max, Mean, Metric, Min, Std
from prefrl.types import Episode, Rollout, StopReason

if TYPE_CHECKING:
    from prefrl.options.policy_gradient import PolicyGradientOptions
    from prefrl.rollout.collect import Collected

logger = logging.getLogger(__name__)

# The most of a prompt or a completion that a cell of the printed table shows. The file has all of it.
_CELL_CHARACTERS, _CELL_LINES = 4000, 100


def rollout_metrics(
    rollouts: Sequence[Rollout], *, has_rewards: bool = True, logged: Mapping[str, float] | None = None
) -> dict[str, Metric]:
    """Rewards and lengths under TRL's names, and the means that reward functions logged; lengths are in tokens.

    `reward` is the mean total reward, `reward_std` the standard deviation (n-1) of all totals, `reward_group_std` the
    mean over groups of the group's, `frac_reward_zero_std` the share of groups whose totals are all equal,
    `frac_unscored` the share of completions of which all rewards are None. Rewards that are None are ignored. Lengths
    of terminated completions are 0 if no completion is terminated.
    """
    played = [rollout for rollout in rollouts if not rollout.has_failed]
    lengths = [len(rollout.sampled_ids) for rollout in played]
    ended = [n for n, r in zip(lengths, played, strict=True) if r.finish_reason != "length"]
    metrics: dict[str, Metric] = {
        "completions/clipped_ratio": Mean(len(lengths) - len(ended), len(lengths)),
        **_lengths("completions", "length", lengths),
        **_lengths("completions", "terminated_length", ended),
    }
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if episodes:
        metrics |= _of_episodes(rollouts, episodes)
    count = len(rollouts)
    own: dict[str, Metric] = {name: Mean(value * count, count) for name, value in (logged or {}).items()}
    if not has_rewards:
        return metrics | own
    totals = [rollout.reward for rollout in rollouts if rollout.reward == rollout.reward]  # NaN does not equal itself
    metrics |= {"reward": Mean(sum(totals), len(totals)), "reward_std": Std.of(totals)}
    for name in rollouts[0].rewards if rollouts else ():
        values = [value for rollout in rollouts if (value := rollout.rewards[name]) is not None]
        metrics[f"rewards/{name}/mean"] = Mean(sum(values), len(values))
        metrics[f"rewards/{name}/std"] = Std.of(values)
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward == rollout.reward:
            groups.setdefault(rollout.group, []).append(rollout.reward)
    deviations = [statistics.stdev(group) if len(group) > 1 else 0.0 for group in groups.values()]
    metrics["reward_group_std"] = Mean(sum(deviations), len(deviations))
    metrics["frac_reward_zero_std"] = Mean(sum(deviation == 0 for deviation in deviations), len(deviations))
    metrics["frac_unscored"] = Mean(sum(rollout.reward != rollout.reward for rollout in played), len(played))
    return metrics | own


def _of_episodes(rollouts: Sequence[Rollout], episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Turns, tool calls under TRL's names, and the share of episodes with each stop reason."""
    num_calls = sum(episode.num_calls for episode in episodes)
    reasons = [episode.stop_reason for episode in episodes]
    return {
        "tools/call_frequency": Mean(num_calls, len(episodes)),
        "tools/failure_frequency": Mean(sum(episode.num_failed_calls for episode in episodes), num_calls),
        **_lengths("episodes", "turns", [len(rollout.turns) for rollout in rollouts]),
        **{f"episodes/stop_reason/{name}": Mean(reasons.count(name), len(reasons)) for name in get_args(StopReason)},
    }


def staleness(rollouts: Sequence[Rollout], *, step: int) -> dict[str, Metric]:
    """Age, in optimizer steps, of the weights that sampled the tokens that are first trained on in step `step`."""
    played = [rollout for rollout in rollouts if not rollout.has_failed]  # others are not trained on
    ages = [step - version for rollout in played for version in rollout.policy_versions]
    if not ages:
        return {}
    return {"sample/staleness_mean": Mean(sum(ages), len(ages)), "sample/staleness_max": Max(max(ages))}


def _lengths(area: str, quantity: str, lengths: Sequence[int]) -> dict[str, Metric]:
    return {
        f"{area}/mean_{quantity}": Mean(sum(lengths), len(lengths), empty=0.0),
        f"{area}/min_{quantity}": Min(min(lengths, default=math.inf), empty=0.0),
        f"{area}/max_{quantity}": Max(max(lengths, default=0)),
    }


def as_text(value: Any) -> str:
    """A prompt or completion, text or messages, as one text."""
    if isinstance(value, str):
        return value
    return "\n".join(f"{message['role']}: {_said(message)}" for message in value)


def _said(message: Mapping[str, Any]) -> str:
    """The content of a message and its tool calls."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    calls = (f"{f.get('name')}({_json(f.get('arguments'))})" for f in functions)
    content = message["content"]
    if isinstance(content, list) and all(isinstance(block, Mapping) for block in content):
        content = "".join(str(block.get("text") or f"[{block.get('type')}]") for block in content)
    return " ".join([*([str(content)] if content or not functions else []), *calls])


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def said_in(rollout: Rollout) -> str:
    """The completion as one text; that of an agent turn by turn, since it may have had several conversations."""
    episode = rollout.episode
    if episode is None or not episode.said:
        return as_text(rollout.text)
    parts = []
    for turn, (messages, parent) in enumerate(zip(episode.said, episode.parents, strict=True)):
        if parent != turn - 1:
            parts.append(f"[turn {turn} {f'goes on from turn {parent}' if parent >= 0 else 'begins a conversation'}]")
        parts.append(as_text(messages))
    return "\n".join(parts)


def messages_of_turn(messages: Sequence[Mapping[str, Any]], turn: int) -> list[Mapping[str, Any]]:
    """What the model said in a turn of an episode, and what it was answered."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if turn >= len(starts):  # the environment failed before the model said something
        return []
    return list(messages[starts[turn] : starts[turn + 1] if turn + 1 < len(starts) else len(messages)])


def log_collected(collected: Collected, *, step: int, limit: int | None, unique: bool, tables: Tables) -> None:
    """Print the completions of all ranks, see `log_completions`, and send them to trackers. All ranks must call it.

    Args:
        collected: Those of this rank.
        step: The optimizer step that is about to learn from them.
        limit: The most rows of the printed table, see `best_and_worst`; None: all completions.
        unique: Print only the first completion of each prompt.
        tables: Those of the trackers, which get all completions.
    """
    parts = distributed.gather_on_main(collected)
    if parts is not None:
        rollouts = type(collected).concat(parts).rollouts
        shown = one_of_each_prompt(rollouts) if unique else rollouts
        shown = shown if limit is None else best_and_worst(shown)[:limit]
        log_completions(shown, title=title_of_step(step))
        _track(rollouts, step=step, tables=tables)


def _track(rollouts: Sequence[Rollout], *, step: int, tables: Tables) -> None:
    names = list(rollouts[0].rewards) if rollouts else []
    columns = ["step", "prompt", "completion", *names, "reward", "advantage"]
    rows = [
        [step, as_text(r.prompt), said_in(r), *(r.rewards[name] for name in names), r.reward, r.advantage]
        for r in rollouts
    ]
    tables.send("completions", columns, rows, step=step)


def one_of_each_prompt(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first rollout of each group."""
    return list({rollout.group: rollout for rollout in reversed(rollouts)}.values())[::-1]


def best_and_worst(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The best and the worst rollout of each group; one, if all its rewards are equal."""
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    found = []
    for group in groups.values():
        scored = [rollout for rollout in group if rollout.reward == rollout.reward] or group[:1]
        best, worst = (choose(scored, key=lambda rollout: rollout.reward) for choose in (max, min))
        found += [best] if best is worst else [best, worst]
    return found


def title_of_step(step: int) -> str:
    """The title of a table of the completions that an optimizer step is about to learn from."""
    return f"Completions before step {step + 1}"


def log_completions(rollouts: Sequence[Rollout], *, title: str) -> None:
    """Print the table. If that fails, it is a warning: it must not end the training.

    Args:
        rollouts: What to show, in order.
        title: What they are.
    """
    try:
        print_table(rollouts, title=title, console=Console())
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}", max_characters=1000)
        logger.warning(f"{title} could not be printed: {reason}")


def print_table(rollouts: Sequence[Rollout], *, title: str, console: Console) -> None:
    """Print a table of prompts, completions, rewards and advantages. Long texts are cut off.

    Args:
        rollouts: The rollouts, in order.
        title: What they are.
        console: The console to print to.
    """
    names = list(rollouts[0].rewards) if rollouts else []
    table = Table(title=title, show_lines=True)
    for column in ("Prompt", "Completion"):
        table.add_column(column, overflow="fold")
    for column in (*names, "Advantage"):
        table.add_column(Text(printable(column)), justify="right")
    for rollout in rollouts:
        values = [rollout.rewards[name] for name in names]
        shown = ["-" if value is None else f"{value:.2f}" for value in values]
        count = len(rollout.row.get("images") or ())
        prompt = f"[{count} image{'s'[: count > 1]}]\n" * (count > 0) + as_text(rollout.prompt)
        texts = [
            Text(printable(value, max_characters=_CELL_CHARACTERS, max_lines=_CELL_LINES))
            for value in (prompt, said_in(rollout))
        ]
        table.add_row(*texts, *shown, f"{rollout.advantage:.2f}")
    console.print(table)


class Tables:
    """Logs tables to Weights & Biases, Trackio, MLflow and Comet, whichever of them a run reports to.

    Args:
        trackers: Names as in `report_to`. HuggingFace has imported these packages and begun their runs.
    """

    def __init__(self, trackers: Iterable[str]) -> None:
        self._trackers = [tracker for tracker in trackers if tracker in _SENDERS]

    def send(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, step: int) -> None:
        """Send a table. A tracker that fails is left out from then on, with one warning.

        Args:
            name: Of the table.
            columns: Names of the columns.
            rows: A value for each column.
            step: The optimizer step of the table, part of the name where a tracker keeps one table for each name.
        """
        for tracker in tuple(self._trackers):
            try:
                _SENDERS[tracker](sys.modules[tracker], name, list(columns), [list(row) for row in rows], step)
            except Exception as error:  # it must not end the training
                self._trackers.remove(tracker)
                logger.warning("%s gets no further tables, because it failed: %s", tracker, reason_of(error))


def _to_wandb(wandb: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    wandb.log({name: wandb.Table(columns=columns, data=rows)})


def _to_trackio(trackio: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    import pandas  # which Trackio needs

    trackio.log({name: trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))}, step=step)


def _to_mlflow(mlflow: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    data = {column: [row[i] for row in rows] for i, column in enumerate(columns)}
    mlflow.log_table(data, artifact_file=f"{name}_{step:05d}.json")


def _to_comet(comet: Any, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
    comet.get_running_experiment().log_table(f"{name}.csv", tabular_data=rows, headers=columns)


_SENDERS: dict[str, Callable[[Any, str, list[str], list[list[Any]], int], None]] = {
    "wandb": _to_wandb,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
    "comet_ml": _to_comet,
}


# Optimizer steps without a learning signal after which a warning is logged.
_WINDOW = 10


class SignalHealth:
    """Warns once, and stops the run if that was asked for, when there has been nothing to learn for many steps.

    Also warns once of a completion that no reward scored.

    There is nothing to learn from a generation batch if all its advantages are 0, its completions are excluded from
    the loss, or its rewards are all equal, which a critic's advantages would hide. A resumed run counts anew.

    Args:
        args: Options.
        has_rewards: Whether there are any. Otherwise, all is learned from a teacher, and there is nothing to judge.
    """

    def __init__(self, args: PolicyGradientOptions, *, has_rewards: bool = True) -> None:
        self._args = args
        self._is_on = has_rewards and args.learns_from_rewards
        self._num_steps = 0  # without a signal, one after another
        # In these steps: all completions; those with an advantage that is not 0, and trained on; those for which every
        # reward returned None; those that were cut off.
        self._counts: Counter[str] = Counter()
        self._had_signal = False
        self._has_warned = False
        self._has_told_unscored = False

    def check(self, rollouts: Sequence[Rollout]) -> dict[str, Metric]:
        """Look at a generation batch. All ranks must call it.

        Args:
            rollouts: The rollouts of this rank, with their advantages.
        Returns:
            `health/signal_fraction`, the share of completions with a signal, and `rewards/<name>/none`, the share for
            which a reward returned None; nothing if rewards are only logged.
        Raises:
            RewardError: There was no signal in `stop_without_signal` steps.
        """
        if not self._is_on:
            return {}
        masks = self._args.mask_truncated_completions
        mine, batch = Counter({"all": len(rollouts), "with_signal": 0}), Counter[str]()
        own_totals: set[float] = set()
        own_row: str | None = None  # the dataset row of the first completion that no reward scored
        for rollout in rollouts:
            is_cut_off, has_none = rollout.finish_reason == "length", math.isnan(rollout.reward)
            mine["with_signal"] += abs(rollout.advantage) > 0 and not (masks and is_cut_off)  # False for NaN
            mine["without_reward"] += has_none
            mine["cut_off"] += is_cut_off
            if not has_none:
                own_totals.add(rollout.reward)
            elif own_row is None and not rollout.has_failed:
                own_row = _row_of(rollout)
        totals: set[float] = set()
        for counts, some, row in distributed.gather_objects((mine, own_totals, own_row)):
            batch.update(counts)
            totals |= some
            if row is not None:
                self._tell_unscored(row)
        if len(totals) < 2:
            mine["with_signal"] = batch["with_signal"] = 0
        if batch["with_signal"]:
            self._num_steps, self._counts, self._had_signal = 0, Counter(), True
        else:
            self._note(batch)
        metrics: dict[str, Metric] = {"health/signal_fraction": Mean(mine["with_signal"], mine["all"])}
        for name in rollouts[0].rewards if rollouts else ():
            num_none = sum(rollout.rewards[name] is None for rollout in rollouts)
            metrics[f"rewards/{name}/none"] = Mean(num_none, len(rollouts))
        return metrics

    def end(self) -> None:
        """Called at the end of training: warns of a run without any signal that was shorter than the window."""
        if self._num_steps > 0 and not self._had_signal:
            self._warn()

    def _tell_unscored(self, row: str) -> None:
        """Warn of the first completion that no reward scored."""
        if self._has_told_unscored:
            return
        self._has_told_unscored = True
        if distributed.is_main():
            logger.warning(
                "every reward returned None for completions of this dataset row: %s. Nothing is learned from such "
                "completions; frac_unscored is their share. Check the columns that the rewards read.",
                row,
            )

    def _note(self, batch: Counter[str]) -> None:
        """A batch without a signal."""
        self._num_steps += self._args.steps_of_a_generation
        self._counts.update(batch)
        limit = self._args.stop_without_signal
        if limit is not None and self._num_steps >= limit:
            raise RewardError(f"{self._finding()} stop_without_signal={limit} ends the run")
        if self._num_steps >= _WINDOW:
            self._warn()

    def _warn(self) -> None:
        if not self._has_warned and distributed.is_main():
            logger.warning("%s stop_without_signal would end such a run", self._finding())
        self._has_warned = True

    def _finding(self) -> str:
        args, reasons = self._args, []
        num, without_reward, cut_off = (self._counts[name] for name in ("all", "without_reward", "cut_off"))
        if without_reward:
            share = without_reward / num
            reasons.append(f"{share:.0%} got None from every reward: check the columns that rewards read")
        if cut_off:
            masked = " and masked by mask_truncated_completions" if args.mask_truncated_completions else ""
            option = f"max_completion_length={args.max_completion_length}"
            reasons.append(f"{cut_off / num:.0%} were cut off{masked}: raise {option}")
        if without_reward < num:
            reasons.append("those of each prompt got the same reward: check the rewards, or raise temperature")
        return (
            f"no learning signal in {self._num_steps} consecutive optimizer steps. Of {num} completions, "
            f"{'; '.join(reasons)}."
        )


def _row_of(rollout: Rollout) -> str:
    """The dataset row of a rollout, without token ids."""
    row = {name: value for name, value in rollout.row.items() if name != "prompt_ids"}
    return printable(repr(row), max_characters=1000)
