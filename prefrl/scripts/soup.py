"""`prefrl soup`: average the checkpoints of one or several runs."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from prefrl.errors import ConfigError
from prefrl.models.soup_choice import check_folders
from prefrl.options.fields import check_fields, check_unset, opt
from prefrl.options.names import nearest
from prefrl.options.offline import OfflineReferenceOptions
from prefrl.registry import REGISTRY, Algorithm
from prefrl.scripts.arguments.datasets import DatasetConfig, load_part
from prefrl.scripts.declaration import command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from prefrl.models.soup import Evaluate
    from prefrl.models.soup_choice import Soup

# Options that only concern the metric.
_FOR_A_METRIC = (
    *("greater_is_better", "top_k", "algorithm", "dataset_name", "dataset_config", "dataset_test_split"),
    *("ref_model", "eval_config"),
)


@dataclass
class SoupArguments:
    """What to average, and how to tell which checkpoints are good."""

    output_dir: str = dataclasses.field(metadata={"help": "Folder for the averaged model."})
    checkpoints: list[str] | None = opt(
        None, "Folders with checkpoints of one architecture, or LoRA adapters of one base model."
    )
    run_dir: str | None = opt(None, "Folder of a run, all of whose checkpoints are used. Set this or checkpoints.")
    method: Literal["uniform", "greedy"] = opt(
        "uniform",
        "'uniform' averages all of them. 'greedy' starts with the best one, and adds those that do not make the "
        "metric worse.",
    )
    weights: list[float] | None = opt(
        None,
        "Weight of each checkpoint with the method uniform, a positive number. By default, all weights are equal.",
    )
    metric: str | None = opt(
        None, "Metric of the algorithm's evaluation, such as eval_loss. By default, nothing is scored."
    )
    greater_is_better: bool | None = opt(
        None, "Whether a greater value is better. By default it is, unless the metric's name ends in loss."
    )
    top_k: int | None = opt(
        None, "Use only this many checkpoints, those with the best metric. By default, all are used."
    )
    algorithm: str | None = opt(
        None, "Algorithm whose evaluation gives the metric. Online algorithms are not supported."
    )
    dataset_name: str | None = opt(None, "Held-out dataset: a name on the Hub, a folder, or a file, as for training.")
    dataset_config: str | None = opt(None, "Configuration of a dataset that has several.")
    dataset_test_split: str = opt("test", "Split to evaluate on. Slices such as train[90%:] work.")
    ref_model: str | None = opt(None, "Model that training started from, for algorithms with a reference.")
    eval_config: str | None = opt(None, "YAML file with options of the algorithm's config that the evaluation uses.")

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.checkpoints is None) == (self.run_dir is None):
            raise ConfigError(
                f"checkpoints={self.checkpoints} and run_dir={self.run_dir!r}: give one of them, either folders of "
                "checkpoints or the folder of a run"
            )
        if self.metric is None:
            self._check_nothing_is_scored()
            return
        missing = [name for name in ("algorithm", "dataset_name") if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"{', '.join(missing)}: not given, but metric={self.metric!r} needs them. Set them.")
        if self.weights is not None:
            raise ConfigError(
                f"weights={self.weights} with metric={self.metric!r}: both determine what is averaged. Remove one."
            )

    def _check_nothing_is_scored(self) -> None:
        if self.method == "greedy":
            raise ConfigError(
                "method='greedy' with metric=None: a metric is needed to decide whether a soup is better. Set metric, "
                "algorithm and dataset_name, or method='uniform'."
            )
        check_unset(self, *_FOR_A_METRIC, because="metric=None", remedy="Set metric.")

    @property
    def folders(self) -> list[Path]:
        """The checkpoints; those of a run are ordered by step."""
        if self.run_dir is None:
            return [Path(checkpoint) for checkpoint in self.checkpoints or ()]
        paths = [path for path in Path(self.run_dir).glob("checkpoint-*") if path.name.split("-", 1)[1].isdigit()]
        if not paths:
            raise ConfigError(f"run_dir={self.run_dir!r}: has no folders checkpoint-<step>. Give checkpoints instead.")
        return sorted(paths, key=lambda path: int(path.name.split("-", 1)[1]))


@command(
    "soup",
    SoupArguments,
    about="Average the weights of checkpoints, or the updates of LoRA adapters.\n\n"
    "Examples:\n  prefrl soup --run_dir runs/a --output_dir averaged\n"
    "  prefrl soup runs/a/checkpoint-100 runs/a/checkpoint-200 --output_dir averaged",
    positional=("checkpoints",),
)
def main(options: SoupArguments) -> int:
    """Average, write and report."""
    check_folders(options.folders, Path(options.output_dir), options.top_k)
    if options.metric is None:
        from prefrl.models.soup import uniform_soup  # imports torch, which mistakes do not need

        soup = uniform_soup(options.folders, options.output_dir, weights=options.weights)
    else:
        soup = _scored_soup(options)
    _report(options, soup)
    return 0


def _scored_soup(options: SoupArguments) -> Soup:
    from prefrl.models.soup import best_soup, greedy_soup

    is_greater_better = options.greater_is_better
    if is_greater_better is None:
        is_greater_better = not str(options.metric).endswith("loss")
    make = greedy_soup if options.method == "greedy" else best_soup
    with tempfile.TemporaryDirectory() as scratch:
        return make(
            options.folders,
            options.output_dir,
            _evaluation(options, scratch),
            greater_is_better=is_greater_better,
            top_k=options.top_k,
        )


def _evaluation(options: SoupArguments, scratch: str) -> Evaluate:
    """A function that computes the metric of a model by evaluating it with an algorithm's trainer."""
    algorithm = _offline(str(options.algorithm))
    config = _config(algorithm, options.eval_config, scratch)
    extra: dict[str, Any] = {}
    if isinstance(config, OfflineReferenceOptions):
        if options.ref_model is None:
            raise ConfigError(
                f"ref_model=None: {algorithm.name} compares a model with a reference, and without one each checkpoint "
                "would be compared with itself. Set ref_model to the model that training began with."
            )
        extra["ref_model"] = options.ref_model
    else:
        because = f"algorithm={algorithm.name!r} has no reference"
        check_unset(options, "ref_model", because=because, remedy="Remove it.")
    part = DatasetConfig(path=str(options.dataset_name), name=options.dataset_config, split=options.dataset_test_split)
    dataset = load_part(part, streaming=False, path_option="dataset_name", split_option="dataset_test_split")
    metric = str(options.metric)

    def evaluate(model: PreTrainedModel) -> float:
        trainer = algorithm.load_trainer()(model=model, args=config, eval_dataset=dataset, **extra)
        metrics: dict[str, float] = trainer.evaluate()
        if metric not in metrics:
            raise ConfigError(
                f"metric={metric!r}: the evaluation of {algorithm.name} has no such metric. "
                f"{nearest(metric, metrics.keys())}"
            )
        return metrics[metric]

    return evaluate


def _offline(name: str) -> Algorithm:
    from prefrl.trainer.offline.trainer import OfflineTrainer

    if name not in REGISTRY:
        raise ConfigError(f"algorithm={name!r}: there is no such algorithm. {nearest(name, REGISTRY)}")
    algorithm = REGISTRY[name]
    if not issubclass(algorithm.load_trainer(), OfflineTrainer):
        raise ConfigError(
            f"algorithm={name!r}: its evaluation samples completions and needs rewards, which this command does not "
            "support. Choose an algorithm that learns from a dataset, or call prefrl.models.soup.greedy_soup with "
            "your own metric."
        )
    return algorithm


def _config(algorithm: Algorithm, file: str | None, scratch: str) -> Any:
    argv = ["--output_dir", scratch, "--report_to", "none"]
    from prefrl.scripts.parsing.argument_parser import ArgumentParser

    parser = ArgumentParser(algorithm.load_config())
    (config,) = parser.parse_args_and_config(argv if file is None else [*argv, "--config", file])
    return config


def _report(options: SoupArguments, soup: Soup) -> None:
    """Print a table, and write its content to soup.json."""
    soup.save(Path(options.output_dir), method=options.method, metric=options.metric)
    table = Table(title=f"{options.method} soup in {options.output_dir}")
    columns = ["share"] + ([] if options.metric is None else [options.metric, "of the soup with it"])
    for column in ("checkpoint", *columns):
        table.add_column(column)
    for ingredient in soup.ingredients:
        numbers = (ingredient.weight, ingredient.metric, ingredient.trial_metric)
        cells = ["-" if number is None else f"{number:.6g}" for number in numbers]
        table.add_row(str(ingredient.checkpoint), *cells[: len(columns)])
    if soup.metric is not None:
        table.add_row("the soup", "1", f"{soup.metric:.6g}", "-")
    Console().print(table)
