"""One case for each algorithm of the registry: a trainer on a tiny model and ragged data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from prefrl.generation.local.generator import LocalGenerator
from prefrl.registry import REGISTRY
from prefrl.rollout.episodes.environment import Agent
from prefrl.trainer.base_trainer import BaseTrainer
from prefrl.trainer.online.trainer import OnlineTrainer
from prefrl.types import Completion
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer
from tests.contract import episodes
from tests.launch import run_ranks
from tests.vlms import image, tiny_vision_judge, tiny_vlm

ROOT = Path(__file__).parents[2]

QUESTIONS = ["1+1=", "What is 23 + 4?", "9-3=", "a", "Count: one, two,", "7*8 is", "12/4", "Say hello to the world."]
ANSWERS = ["2", "27, twenty-seven", "6", "bcd", " three, four, five, six", "56", "3", "Hello, world!"]


def ragged_reward(completions: list[str], **_: Any) -> list[float]:
    """Depends on every character, so that groups have different means and deviations."""
    return [sum(ord(c) * (i + 1) % 7 for i, c in enumerate(text)) / 10 for text in completions]


def dataset_of(algorithm: str, num_rows: int = 24) -> Dataset:
    """Rows of different lengths, in the form that the algorithm learns from."""
    return Dataset.from_list([_ROWS[algorithm](i) for i in range(num_rows)])


def reward_of_text(completions: list[Any], **_: Any) -> list[float]:
    """`ragged_reward` of messages."""
    return ragged_reward([messages[0]["content"] for messages in completions])


def with_pictures(rows: Dataset) -> Dataset:
    """Rows as conversations: two of three have images, one or two of different sizes."""
    return Dataset.from_list([_with_pictures(row, i) for i, row in enumerate(rows)])


def _with_pictures(row: dict[str, Any], i: int) -> dict[str, Any]:
    pictures = [image(seed=i), image(seed=i + 1, size=(40, 70))][: i % 3]
    roles = {"prompt": "user", **dict.fromkeys(("completion", "chosen", "rejected"), "assistant")}
    return {
        **{name: [{"role": roles[name], "content": text}] if name in roles else text for name, text in row.items()},
        "images": pictures,
    }


def _prompt(i: int) -> str:
    return f"{QUESTIONS[i % 8]}{'?' * (i // 8)}"


def _prompt_row(i: int) -> dict[str, Any]:
    return {"prompt": _prompt(i)}


def _hinted_row(i: int) -> dict[str, Any]:
    return {"prompt": _prompt(i), "hint": f"Say {len(_prompt(i))}: {_prompt(i)}"}


def _completion_row(i: int) -> dict[str, Any]:
    return {"prompt": _prompt(i), "completion": ANSWERS[(3 * i) % 8]}


def _unpaired_row(i: int) -> dict[str, Any]:
    return {**_completion_row(i), "label": i % 3 == 0}


def _pair_row(i: int) -> dict[str, Any]:
    return {"prompt": _prompt(i), "chosen": ANSWERS[(3 * i) % 8], "rejected": ANSWERS[(5 * i + 1) % 8] + "!"}


def _margin_row(i: int) -> dict[str, Any]:
    return {**_pair_row(i), "margin": i % 4 / 4}


# Algorithms that learn from their own completions.
ONLINE = ("grpo", "rloo", "reinforce_plus_plus", "ppo", "online_dpo", "distillation")

# Others share with one of these all code but their loss, what they keep and what they evaluate.
REPRESENTATIVES = ("sft", "reward", "dpo", "bco", "grpo", "ppo")

_ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sft": _completion_row,
    "dpo": _pair_row,
    "kto": _unpaired_row,
    "orpo": _pair_row,
    "cpo": _pair_row,
    "bco": _unpaired_row,
    "reward": _margin_row,
    **dict.fromkeys(ONLINE, _prompt_row),
    "distillation": _hinted_row,
}

# Options of `make_trainer` that are not the config's.
ARGUMENTS = (
    "peft_config",
    "eval_dataset",
    "callbacks",
    "optimizers",
    "processing_class",
    "train_dataset",
    "ref_model",
    "teacher_model",
    "embedding_func",
    "embedding_tokenizer",
    "value_model",
    "compute_metrics",
    "eval_reward_funcs",
)

# A step of 8 rows on one process, as SGD: the weights' change is the gradient.
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1} for name in REGISTRY
}
for _name in ONLINE:
    OPTIONS[_name] |= {"num_generations": 4, "max_completion_length": 12, "temperature": 1.0, "top_k": None}
OPTIONS["ppo"] |= {"num_generations": 1, "num_iterations": 1, "critic_learning_rate": 0.1}
OPTIONS["online_dpo"] |= {"num_generations": 2, "learning_rate": 1.0}
# Their gradients are smaller by the factor beta.
for _name in ("dpo", "kto", "bco"):
    OPTIONS[_name] |= {"learning_rate": 1.0}


def model_of(algorithm: str, **overrides: Any) -> PreTrainedModel:
    """A model that the algorithm can train."""
    return tiny_reward_model(**overrides) if algorithm == "reward" else stopping_model(**overrides)


def stopping_model(*, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Every fifth token ends a completion, so that lengths differ and some are cut off."""
    return tiny_model(seed=seed, eos_token_id=[1, *range(10, 128, 5)], **overrides)


def make_trainer(
    algorithm: str,
    output_dir: Path,
    *,
    model: str | PreTrainedModel | None = None,
    rows: int = 24,
    reward: Any = ragged_reward,
    **options: Any,
) -> BaseTrainer:
    """A trainer of the registry with deterministic data; `options` override the config."""
    row = REGISTRY[algorithm]
    arrival = options.pop("arrival", None)  # seed of the order in which groups arrive, see ArrivingGenerator
    streams = options.pop("streams", False)  # the training data as a stream
    # Episodes instead of single completions: "forgetful", "faithful", or "agent", with a forgetful template.
    talks = options.pop("talks", None)
    if talks is not None:
        if talks == "agent":
            options = {"environment": Agent(episodes.stray), "max_turns": None} | options
        options = {"tool_parser": episodes.parsed, "max_completion_length": 40, "max_turns": 4} | options
        options.setdefault("processing_class", episodes.tokenizer(forgets=talks != "faithful"))
        options.setdefault("train_dataset", Dataset.from_list(episodes.prompts(rows)))
        options.setdefault("environment", episodes.Talk)
        reward = None
    pictures = options.pop("pictures", None)  # family of a vision-language model, which gets rows with images
    if pictures is not None:
        model, processor = (tiny_vision_judge if algorithm == "reward" else tiny_vlm)(pictures)
        options = {
            "processing_class": processor,
            "train_dataset": with_pictures(dataset_of(algorithm, rows)),
        } | options
        options = {"max_prompt_length": None} | options if algorithm in ONLINE else {"max_length": None} | options
        reward = reward_of_text if reward is ragged_reward else reward
    environment = options.pop("environment", None)
    several = options.pop("several", False)  # teachers of different widths, of which each row names one
    if several:
        named = dataset_of(algorithm, rows).add_column("teacher", ["wide", "deep", "wide"] * (rows // 3))
        deep = tiny_model(seed=8, num_hidden_layers=3)
        options |= {
            "train_dataset": named,
            "teacher_model": {"deep": deep, "wide": tiny_model(seed=9, hidden_size=24)},
        }
    extra = {key: options.pop(key) for key in ARGUMENTS if key in options}
    config = row.load_config()(
        **(
            {
                "output_dir": str(output_dir),
                "use_cpu": True,
                "max_steps": 1,
                "learning_rate": 0.1,
                "optim": "sgd",
                "lr_scheduler_type": "constant",
                "max_grad_norm": 0.0,
                "report_to": "none",
                "disable_tqdm": True,
                "save_strategy": "no",
                "logging_steps": 1,
            }
            | OPTIONS[algorithm]
            | options
        )
    )
    arguments: dict[str, Any] = {}
    extra.setdefault("processing_class", tiny_tokenizer())
    extra.setdefault("train_dataset", dataset_of(algorithm, rows))
    if streams:
        extra["train_dataset"] = extra["train_dataset"].to_iterable_dataset()
    if algorithm == "distillation" or options.get("teacher_kl_coef"):  # of another width
        extra.setdefault("teacher_model", tiny_model(seed=9, hidden_size=24))
    if algorithm in ONLINE:
        arguments |= {"reward_funcs": reward, "environment_factory": environment}
    trainer = row.load_trainer()(model=model or model_of(algorithm), args=config, **arguments, **extra)
    if arrival is not None:
        assert isinstance(trainer, OnlineTrainer)
        local = LocalGenerator(trainer.policy, tokenizer=trainer.processing_class)
        trainer.generator = ArrivingGenerator(local, order_seed=arrival)
    return trainer


class ArrivingGenerator:
    """A local generator that samples when it is asked, and whose groups arrive in an order of their own."""

    def __init__(self, local: LocalGenerator, *, order_seed: int) -> None:
        self.local = local
        self.random = random.Random(order_seed)
        self.num_cancelled = 0
        self.num_lost = 0  # groups that are still to be lost before they arrive

    def start(self, prompts: Any, sampling: Any, *, seeds: Any) -> ArrivingGroups:
        groups = list(enumerate(self.local.generate(prompts, sampling, seeds=seeds)))
        self.random.shuffle(groups)
        return ArrivingGroups(self, groups)

    def generate(self, prompts: Any, sampling: Any, *, seeds: Any) -> list[list[Completion]]:
        return self.local.generate(prompts, sampling, seeds=seeds)

    def sync(self, weights: Any, *, version: int) -> None:
        self.local.sync(weights, version=version)

    def invalidate(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class ArrivingGroups:
    generator: ArrivingGenerator
    groups: list[tuple[int, list[Completion]]]
    lost: list[tuple[int, list[Completion]]] = field(default_factory=list)

    longest_silence = 60.0

    def as_completed(self) -> Iterator[tuple[int, list[Completion]]]:
        yield from self.groups

    def cancel(self) -> None:
        self.generator.num_cancelled += 1

    # At every second look at most, a group arrives.

    @property
    def is_stuck(self) -> bool:
        return bool(self.lost) and not self.groups

    def arrived(self) -> Iterator[tuple[int, list[Completion]]]:
        if self.groups and self.generator.random.random() < 0.5:
            group = self.groups.pop()
            if self.generator.num_lost:
                self.generator.num_lost -= 1
                self.lost.append(group)
            else:
                yield group

    def repeat_lost(self) -> None:
        self.groups += self.lost
        self.lost = []


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_weights(trainer: BaseTrainer, other: BaseTrainer) -> None:
    """To the bit."""
    found, expected = weights_of(trainer.model), weights_of(other.model)
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def whole_and_resumed(algorithm: str, folder: Path, step: int, **options: Any) -> tuple[BaseTrainer, BaseTrainer]:
    """A training that saves, and one that is resumed from its checkpoint of a step."""
    whole = make_trainer(algorithm, folder, **options)
    whole.train()
    resumed = make_trainer(algorithm, folder, **options)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return whole, resumed


def update_of(trainer: BaseTrainer, *, resume_from_checkpoint: str | None = None) -> torch.Tensor:
    """The change of all weights over `train()`, as one vector; from the first weights also after a resume."""
    before = weights_of(trainer.model)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    after = weights_of(trainer.model)
    return torch.cat([(after[name] - before[name]).flatten() for name in before])


def train_inside(trainer: BaseTrainer, around: Callable[[int], AbstractContextManager[Any]]) -> int:
    """Train with forward and backward of step i inside `around(i)`; returns how many steps there were."""
    original = trainer.training_step
    steps = 0

    def watched(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        with around(steps - 1):
            return original(*args)

    trainer.training_step = watched
    trainer.train()
    return steps


@dataclass(frozen=True)
class Job:
    """One training on two processes; rank 0 stores its update in `result`, and the run beside it in `run`."""

    algorithm: str
    options: dict[str, Any]
    result: Path
    checkpoint: Path | None = None


def run_on_two_processes(jobs: Sequence[Job]) -> list[torch.Tensor]:
    """Train one after another on two gloo processes."""
    texts = [
        repr((job.algorithm, job.options, str(job.result), job.checkpoint and str(job.checkpoint))) for job in jobs
    ]
    run_ranks("tests.contract.worker", *texts)
    return [torch.load(job.result) for job in jobs]


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||."""
    return float((a - b).norm() / b.norm())
