"""Callbacks for `callbacks`: an average of the weights, and completions of evaluation prompts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from prefrl import distributed
from prefrl.errors import ConfigError, printable, reason_of, require
from prefrl.generation.base import SamplingParams
from prefrl.generation.local.generator import LocalGenerator
from prefrl.models.export import whole_state
from prefrl.rollout.summary import Tables
from prefrl.trainer.checkpointing import StatefulCallback

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import GenerationConfig, PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

    from prefrl.models.reference import Reference
    from prefrl.options.preference import ReferenceOptions
    from prefrl.trainer.base_trainer import BaseTrainer

_log = logging.getLogger(__name__)

_FOLDER = "bema"  # in output_dir
_STATE_FILE = "bema.safetensors"
_START, _AVERAGE, _CORRECTED = "start", "average", "corrected"


class BEMACallback(StatefulCallback):
    """Averages the weights (BEMA), and saves them as a model in `output_dir/bema` when training ends.

    Every `update_freq` steps, with the weights theta_t after step t and theta_0 after step `update_after`:

        EMA_t  = (1 - beta_t) EMA + beta_t theta_t,   beta_t  = (lag + multiplier t)^-ema_power
        BEMA_t = EMA_t + alpha_t (theta_t - theta_0), alpha_t = (lag + multiplier t)^-bias_power

    The average starts at theta_0. Weights that are not trained are left out. The process that saves the model keeps
    three copies of the trained weights in float32. They are part of checkpoints, so a resumed run goes on with them.

    Args:
        update_freq: Steps from one update to the next, called phi in the paper.
        ema_power: kappa in the paper. At 0, the average is the latest weights.
        bias_power: eta in the paper. At 0, the whole difference is added; the larger it is, the less is added.
        lag: rho in the paper, the age of the average when it starts.
        update_after: tau in the paper, the step at which it starts.
        multiplier: gamma.
        min_ema_multiplier: Lowest beta_t.
        device: Where the copies are kept.
        update_ref_model: Whether the trainer's reference model gets the averaged weights.
        ref_model_update_freq: Steps from one such update to the next.
        ref_model_update_after: The step of the first one, if it is above 0.

    Raises:
        ConfigError: A number is out of bounds, or the trainer has no reference model that can be updated.

    Source: Block and Zhang 2025, arXiv 2508.00180, algorithm 1.
    """

    def __init__(  # noqa: PLR0913 - TRL's constructor
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        for name, value, lowest in (
            ("update_freq", update_freq, 1),
            ("ema_power", ema_power, 0),
            ("bias_power", bias_power, 0),
            ("lag", lag, 1),
            ("update_after", update_after, 0),
            ("multiplier", multiplier, 0),
            ("min_ema_multiplier", min_ema_multiplier, 0),
            ("ref_model_update_freq", ref_model_update_freq, 1),
            ("ref_model_update_after", ref_model_update_after, 0),
        ):
            if value < lowest:
                raise ConfigError(f"BEMACallback({name}={value}): must be at least {lowest}")
        self.update_freq = update_freq
        self.ema_power = ema_power
        self.bias_power = bias_power
        self.lag = lag
        self.update_after = update_after
        self.multiplier = multiplier
        self.min_ema_multiplier = min_ema_multiplier
        self.device = torch.device(device)
        self.moves_reference = update_ref_model
        self.ref_model_update_freq = ref_model_update_freq
        self.ref_model_update_after = ref_model_update_after
        self._reference: Reference | None = None
        self._copies: dict[str, dict[str, Tensor]] = {}  # of which weights -> name -> float32

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the average, if it is to start with the first step."""
        if self.moves_reference and self._reference is None:
            raise ConfigError(
                "BEMACallback(update_ref_model=True): the trainer keeps no reference model, or got the callback after "
                "its construction. Use beta > 0 without precompute_ref_log_probs, and give the callback in callbacks."
            )
        if state.global_step == 0:
            self._copies = {}
        if state.global_step == self.update_after:
            self._start(kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Updates the average, if it is due."""
        since = state.global_step - self.update_after
        if since == 0:
            self._start(kwargs["model"])
        elif since > 0 and since % self.update_freq == 0:
            self._update(kwargs["model"], state.global_step)
        since_first = state.global_step - self.ref_model_update_after
        is_due = since_first >= 0 and since_first % self.ref_model_update_freq == 0
        if self._reference is not None and since >= 0 and is_due:
            self._reference.assign(self._corrected(kwargs["model"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves the averaged model. All processes must call it."""
        if state.global_step < self.update_after + self.update_freq:
            if distributed.is_main():
                _log.warning(
                    "BEMACallback(update_freq=%d, update_after=%d): training ended after step %d, before the first "
                    "update, so there is no average to save.",
                    self.update_freq,
                    self.update_after,
                    state.global_step,
                )
            return
        self._save_model(distributed.unwrap(kwargs["model"]), Path(args.output_dir, _FOLDER))

    def _start(self, model: nn.Module) -> None:
        start = {name: weight.clone() for name, weight in self._trained(model)}
        if start:
            average, corrected = ({name: weight.clone() for name, weight in start.items()} for _ in range(2))
            self._copies = {_START: start, _AVERAGE: average, _CORRECTED: corrected}

    def _update(self, model: nn.Module, step: int) -> None:
        age = self.lag + self.multiplier * step
        beta = max(age**-self.ema_power, self.min_ema_multiplier)
        alpha = age**-self.bias_power
        for name, weight in self._trained(model):
            start, average = self._copies[_START][name], self._copies[_AVERAGE][name]
            average.lerp_(weight, beta)
            self._copies[_CORRECTED][name] = average + alpha * (weight - start)

    def take_reference(self, reference: Reference, options: ReferenceOptions) -> None:
        """See `StatefulCallback`.

        Raises:
            ConfigError: `sync_ref_model` moves the reference, too, or what it computed is kept.
        """
        refused = (("sync_ref_model", True), ("precompute_ref_log_probs", True), ("kl_estimator", "full"))
        for name, value in refused:
            if vars(options).get(name) == value:
                raise ConfigError(
                    f"BEMACallback(update_ref_model=True) with {name}={value!r}: the reference cannot be moved by "
                    f"both, or after what it computed is kept. Leave {name} out, or update_ref_model."
                )
        self._reference = reference

    def _corrected(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The averaged weights one by one, on all processes."""
        for name, parameter in distributed.unwrap(model).named_parameters():
            if parameter.requires_grad:
                weight: Any = self._copies[_CORRECTED][name] if distributed.is_main() else None
                yield name, distributed.from_main(weight)

    def _trained(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The trained weights one by one, in float32, on the main process; others only help to gather them."""
        for name, parameter in distributed.unwrap(model).named_parameters():
            if parameter.requires_grad:
                weight = distributed.whole(parameter).detach()
                if distributed.is_main():
                    yield name, weight.to(self.device, torch.float32)

    def _save_model(self, model: PreTrainedModel, folder: Path) -> None:
        state = whole_state(model, keep=distributed.is_main())  # None: the weights are whole
        if not distributed.is_main():
            return
        tensors = model.state_dict(keep_vars=True)
        if state is None:
            state = {name: tensor.detach() for name, tensor in tensors.items()}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        corrected = self._copies[_CORRECTED]
        for name, tensor in tensors.items():
            own = names.get(id(tensor))  # tied weights have several names
            if own in corrected and name in state:
                state[name] = corrected[own].to(tensor.dtype)
        model.save_pretrained(folder, state_dict=state)

    def save_state(self, folder: Path) -> None:
        """See `StatefulCallback`."""
        copies = {f"{kind}/{name}": weight for kind, part in self._copies.items() for name, weight in part.items()}
        save_file({name: weight.contiguous() for name, weight in copies.items()}, folder / _STATE_FILE)

    def load_state(self, folder: Path) -> None:
        """See `StatefulCallback`.

        Raises:
            ConfigError: The checkpoint was saved without this callback.
        """
        path = folder / _STATE_FILE
        if not path.exists():
            raise ConfigError(
                f"{folder} has no {_STATE_FILE}: it was saved without BEMACallback, so the average cannot continue. "
                "Leave the callback out, or start a new run with it."
            )
        self._copies = {}
        if distributed.is_main():
            for name, weight in load_file(path, device=str(self.device)).items():
                kind, _, of = name.partition("/")
                self._copies.setdefault(kind, {})[of] = weight


_COLUMNS = ("step", "prompt", "completion")
_MAX_TOKENS = 256  # of a completion, unless the generation config says how many


class LogCompletionsCallback(TrainerCallback):
    """Samples completions of prompts of `trainer.eval_dataset` with the weights as they are.

    They are printed as a table. With Weights & Biases, Trackio, MLflow or Comet in `report_to`, they are also logged
    there as the table `completions`, together with those of earlier steps. In data for supervised fine-tuning, the
    prompt is everything before the first trained token.

    Args:
        trainer: The trainer, to which the callback is then added: `trainer.add_callback(callback)`.
        generation_config: Its `max_new_tokens` (256 unless set), `do_sample` (greedy unless True), `temperature`,
            `top_p`, `top_k`, `min_p` and `repetition_penalty` are read. None means the model's own.
        num_prompts: Number of prompts, from the start of the dataset. None means all.
        freq: Number of steps between two samplings. By default, completions are sampled at each evaluation.

    Raises:
        ConfigError: The trainer has no evaluation dataset or several, or its model cannot generate.
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

    @distributed.without_teams()
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


class WeaveCallback(LogCompletionsCallback):
    """Logs completions of prompts of `trainer.eval_dataset` to W&B Weave at each evaluation, with scores.

    Args:
        trainer: The trainer, to which the callback is then added: `trainer.add_callback(callback)`.
        project_name: The project of Weave, unless the script has called `weave.init`; the default is the project of
            the Weights & Biases run that is active when training begins.
        scorers: By name, functions of a prompt and a completion, both texts, that return a number. What they return is
            logged for each completion, and its mean as `avg_<name>`. By default, completions are logged without
            scores.
        generation_config: See `LogCompletionsCallback`.
        num_prompts: Number of prompts, from the start of the dataset. The default is all of them.
        dataset_name: What Weave calls the dataset.
        model_name: What Weave calls the model. The default is its name or path.

    Raises:
        ConfigError: See `LogCompletionsCallback`; or weave is not installed, or there is no project.
    """

    def __init__(
        self,
        trainer: BaseTrainer[Any],
        project_name: str | None = None,
        scorers: Mapping[str, Callable[[str, str], float]] | None = None,
        generation_config: GenerationConfig | None = None,
        num_prompts: int | None = None,
        dataset_name: str = "eval_dataset",
        model_name: str | None = None,
    ) -> None:
        self._weave: Any = require("weave", extra=None, feature="WeaveCallback")
        super().__init__(trainer, generation_config, num_prompts)
        self.project_name = project_name
        self.scorers = scorers or {}
        self.dataset_name = dataset_name
        self.model_name = model_name or str(trainer.policy.config.name_or_path or "model")
        self._last_step: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Connects to Weave."""
        if state.is_world_process_zero:
            self._connect()

    def _connect(self) -> None:
        context: Any = require("weave.trace.context.weave_client_context", extra=None, feature="WeaveCallback")
        if context.get_weave_client() is not None:
            return
        run = getattr(sys.modules.get("wandb"), "run", None)
        project = self.project_name or (None if run is None else f"{run.entity}/{run.project}")
        if project is None:
            raise ConfigError(
                "WeaveCallback(project_name=None): there is neither a client of Weave nor a run of Weights & Biases. "
                "Give project_name, or call weave.init(...) before."
            )
        self._weave.init(project)

    def _log(self, step: int) -> None:
        if step == self._last_step:
            return
        self._last_step = step
        rows = self._sampled()
        if distributed.is_main():
            try:
                self._connect()
                self._send(rows, step)
            except Exception as error:  # it must not end the training
                _log.warning("The completions of step %d could not be logged to Weave: %s", step, reason_of(error))

    def _send(self, rows: Sequence[tuple[str, str]], step: int) -> None:
        sampling = None if self.generation_config is None else self.generation_config.to_dict()
        attributes = {"training_step": step, "model_name": self.model_name, "generation_config": sampling}
        logger = self._weave.EvaluationLogger(
            model=self.model_name, dataset=self.dataset_name, eval_attributes=attributes
        )
        found: dict[str, list[float]] = {}
        for prompt, completion in rows:
            prediction = logger.log_prediction(inputs={"prompt": prompt}, output=completion)
            for name, scorer in self.scorers.items():
                score = scorer(prompt, completion)
                prediction.log_score(scorer=name, score=score)
                found.setdefault(name, []).append(score)
            prediction.finish()
        if not found:
            logger.finish()
            return
        means = {f"avg_{name}": sum(scores) / len(scores) for name, scores in found.items()}
        logger.log_summary({"total_predictions": len(rows), "successful_predictions": len(rows), **means})


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
