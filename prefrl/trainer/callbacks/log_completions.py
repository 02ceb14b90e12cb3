"""Samples completions of evaluation prompts now and then, and shows them as a table."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.errors import ConfigError
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.printable import printable, reason_of
from prefrl.rollout.summary import Tables

if TYPE_CHECKING:
    from transformers import GenerationConfig, TrainerControl, TrainerState, TrainingArguments

    from prefrl.trainer.base_trainer import BaseTrainer

__all__ = ["LogCompletionsCallback"]

_log = logging.getLogger(__name__)

_COLUMNS = ("step", "prompt", "completion")
_MAX_TOKENS = 256  # of a completion, unless the generation config says how many


class LogCompletionsCallback(TrainerCallback):
    """Samples completions of prompts of `trainer.eval_dataset` with the weights as they are.

    They are printed as a table. With Weights & Biases, Trackio, MLflow or Comet in `report_to`, they are also logged
    there as the table `completions`, together with those of earlier steps. In data for supervised fine-tuning, the
    prompt is what comes before the first trained token.

    Args:
        trainer: The trainer, to which the callback is then added: `trainer.add_callback(callback)`.
        generation_config: Its `max_new_tokens` (256 unless set), `do_sample` (greedy unless True), `temperature`,
            `top_p`, `top_k`, `min_p` and `repetition_penalty` are read; None: the model's own.
        num_prompts: How many prompts, from the start of the dataset; None: all.
        freq: Sample every this many steps; None: at each evaluation.

    Raises:
        ConfigError: The trainer has not one evaluation dataset, or its model cannot generate.
    """

    def __init__(
        self,
        trainer: BaseTrainer[Any],
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        freq: int | None = None,
    ) -> None:
        if trainer.eval_dataset is None or isinstance(trainer.eval_dataset, Mapping):
            given = "None" if trainer.eval_dataset is None else f"the datasets {sorted(trainer.eval_dataset)}"
            raise ConfigError(f"LogCompletionsCallback with eval_dataset={given}: it samples from one dataset")
        if not trainer.policy.can_generate():
            raise ConfigError(f"LogCompletionsCallback with a {type(trainer.policy).__name__}, which cannot generate")
        for name, value in (("num_prompts", num_prompts), ("freq", freq)):
            if value is not None and value < 1:
                raise ConfigError(f"LogCompletionsCallback({name}={value}): must be at least 1, or None")
        self.trainer = trainer
        self.generation_config = generation_config
        self.num_prompts = num_prompts
        self.freq = freq
        self._tables = Tables(trainer.args.report_to)
        self.table: list[tuple[int, str, str]] = []  # all rows so far, on the main process

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if self.freq is not None and state.global_step % self.freq == 0:
            self._log(state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """HuggingFace's hook."""
        if self.freq is None:
            self._log(state.global_step)

    def _log(self, step: int) -> None:
        rows = [(step, prompt, completion) for prompt, completion in self._sampled()]
        if not distributed.is_main():
            return
        self.table += rows
        for show in (_print, self._track):
            try:
                show(rows)
            except Exception as error:  # it must not end the training
                _log.warning("The completions of step %d could not be logged: %s", step, reason_of(error))

    def _sampled(self) -> list[tuple[str, str]]:
        """Prompts and completions, as texts, in the order of the dataset; each process samples its share."""
        args, tokenizer = self.trainer.args, self.trainer.tokenizer
        prompts = [_prompt_ids(row) for row in islice(self.trainer.eval_dataset, self.num_prompts)]
        mine = range(distributed.rank(), len(prompts), distributed.world_size())
        generator = LocalGenerator(
            self.trainer.policy,
            tokenizer=tokenizer,
            max_rows=args.per_device_eval_batch_size,
            autocast=self.trainer.accelerator.autocast,
        )
        sampled = generator.generate(
            [prompts[i] for i in mine],
            _sampling(self.generation_config or self.trainer.policy.generation_config),
            seeds=[args.seed + i for i in mine],
        )
        found = {i: completion.token_ids for i, (completion,) in zip(mine, sampled, strict=True)}
        everyone = {i: ids for part in distributed.gather_objects(found) for i, ids in part.items()}
        return [
            (tokenizer.decode(prompt), tokenizer.decode(everyone[i], skip_special_tokens=True))
            for i, prompt in enumerate(prompts)
        ]

    def _track(self, _: Sequence[tuple[int, str, str]]) -> None:
        step = self.trainer.state.global_step
        self._tables.send("completions", _COLUMNS, self.table, step=step)


def _prompt_ids(row: Mapping[str, Any]) -> list[int]:
    """The prompt of a prepared row."""
    ids: list[int] = row["prompt_ids"] if "prompt_ids" in row else row["input_ids"][: row["trainable"].index(True)]
    return ids


def _sampling(config: GenerationConfig) -> SamplingParams:
    temperature = 1.0 if config.temperature is None else config.temperature
    return SamplingParams(
        num_samples=1,
        max_tokens=config.max_new_tokens or _MAX_TOKENS,
        temperature=temperature if config.do_sample else 0.0,
        top_p=config.top_p or 1.0,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty or 1.0,
    )


def _print(rows: Sequence[tuple[int, str, str]]) -> None:
    table = Table(*_COLUMNS, title="Completions", show_lines=True)
    for step, prompt, completion in rows:
        table.add_row(str(step), *(Text(printable(text, max_characters=1000)) for text in (prompt, completion)))
    Console().print(table)
