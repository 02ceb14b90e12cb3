"""Writes the model card, the README.md of a saved model."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from prefrl import __version__
from prefrl.errors import masked, printable
from prefrl.options.fields import default_of
from prefrl.options.policy import POLICY_LOSS_FACTS
from prefrl.options.preference import CPO_LOSS_FACTS, PAIR_LOSS_FACTS

if TYPE_CHECKING:
    from prefrl.trainer.base_config import BaseConfig

_PAPERS = {
    "sft": "Supervised fine-tuning: the mean negative log-likelihood of the trained tokens.",
    "dpo": "Direct preference optimization: [arXiv 2305.18290](https://arxiv.org/abs/2305.18290).",
    "kto": "Kahneman-Tversky optimization: [arXiv 2402.01306](https://arxiv.org/abs/2402.01306).",
    "orpo": "Odds ratio preference optimization: [arXiv 2403.07691](https://arxiv.org/abs/2403.07691).",
    "cpo": "Contrastive preference optimization: [arXiv 2401.08417](https://arxiv.org/abs/2401.08417).",
    "bco": "Binary classifier optimization: [arXiv 2404.04656](https://arxiv.org/abs/2404.04656).",
    "reward": "Reward modeling: the Bradley-Terry likelihood of preferences.",
    "grpo": "Group relative policy optimization: DeepSeekMath, [arXiv 2402.03300](https://arxiv.org/abs/2402.03300).",
    "rloo": "REINFORCE with a leave-one-out baseline: [arXiv 2402.14740](https://arxiv.org/abs/2402.14740).",
    "reinforce_plus_plus": "REINFORCE++: [arXiv 2501.03262](https://arxiv.org/abs/2501.03262).",
    "ppo": "Proximal policy optimization: [arXiv 1707.06347](https://arxiv.org/abs/1707.06347).",
    "online_dpo": "Online direct preference optimization: [arXiv 2402.04792](https://arxiv.org/abs/2402.04792).",
    "distillation": "On-policy distillation: GKD, [arXiv 2306.13649](https://arxiv.org/abs/2306.13649).",
}
# Authors, title and year of the papers above, for the citation.
_CITED = {
    "dpo": ("Rafailov, Rafael and others", "Direct Preference Optimization", 2023),
    "kto": ("Ethayarajh, Kawin and others", "KTO: Model Alignment as Prospect Theoretic Optimization", 2024),
    "orpo": ("Hong, Jiwoo and others", "ORPO: Monolithic Preference Optimization without Reference Model", 2024),
    "cpo": ("Xu, Haoran and others", "Contrastive Preference Optimization", 2024),
    "bco": ("Jung, Seungjae and others", "Binary Classifier Optimization for Large Language Model Alignment", 2024),
    "grpo": ("Shao, Zhihong and others", "DeepSeekMath: Pushing the Limits of Mathematical Reasoning", 2024),
    "rloo": ("Ahmadian, Arash and others", "Back to Basics: Revisiting REINFORCE Style Optimization", 2024),
    "reinforce_plus_plus": ("Hu, Jian and others", "REINFORCE++", 2025),
    "ppo": ("Schulman, John and others", "Proximal Policy Optimization Algorithms", 2017),
    "online_dpo": ("Guo, Shangmin and others", "Direct Language Model Alignment from Online AI Feedback", 2024),
    "distillation": ("Agarwal, Rishabh and others", "On-Policy Distillation of Language Models", 2023),
}
# How a title names the algorithms that it does not write in capitals.
_TITLES = {
    "reward": "as a reward model",
    "reinforce_plus_plus": "with REINFORCE++",
    "online_dpo": "with online DPO",
}
# Where the losses that `loss_type` names come from.
_LOSSES: dict[str, Mapping[Any, Any]] = {
    **dict.fromkeys(("dpo", "online_dpo"), PAIR_LOSS_FACTS),
    **dict.fromkeys(("grpo", "rloo", "reinforce_plus_plus"), POLICY_LOSS_FACTS),
    "cpo": CPO_LOSS_FACTS,
}
_NAME_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PACKAGES = ("transformers", "torch", "datasets", "tokenizers")
# What a run needs besides the options that decide its updates.
_SIZES = ("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")
_UNSET: tuple[Any, ...] = (None, False, [], {}, "")  # 0 is False here, and as good as off
# Metrics of the machine and of the bookkeeping, which say nothing of the model.
_TECHNICAL = (
    *("time/", "perf/", "server/", "health/", "guard/", "step", "epoch", "total_flos", "train_"),
    *("frac_", "clip_ratio/", "completions/m"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "num_input_tokens_seen"),
)
_SHOWN_ANYWAY = ("completions/mean_length",)
_WORD = re.compile(r"[\w.+-]{1,40}", re.ASCII)  # no path, no URL, no sentence


@dataclass(frozen=True)
class RunFacts:
    """What the card says about the training itself. It has no paths, no secrets and no text of the data."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # those that are not at their defaults
    all: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # also those at their defaults, unless it is off
    seed: int | None = None
    num_rows: int | None = None  # of the prepared training dataset; None: a stream, or no training
    data_hash: str | None = None
    rewards: tuple[str, ...] = ()  # without those that environments give themselves
    played: tuple[str, ...] = ()  # classes of environments, and tools

    @classmethod
    def of(cls, config: BaseConfig, decisive: Mapping[str, Any]) -> RunFacts:
        """The facts of a run.

        Args:
            config: Its options.
            decisive: See `BaseTrainer.decisive`.
        """
        fields = {field.name: field for field in dataclasses.fields(config)}
        names = [name for name in fields if name in decisive or name in _SIZES]
        values = {name: getattr(config, name) for name in names}
        changed = {name: _plain(value) for name, value in values.items() if value != default_of(fields[name])}
        main = {name: _plain(getattr(config, name)) for name in names}
        data, played = decisive.get("data") or {}, tuple(decisive.get("episodes", ()))
        return cls(
            {name: value for name, value in changed.items() if _is_shown(value) and masked(value, name) == value},
            {name: value for name, value in main.items() if value not in _UNSET and _is_shown(value)},
            seed=config.seed,
            num_rows=data.get("rows"),
            data_hash=data.get("hash"),
            rewards=tuple(name for name in decisive.get("rewards", ()) if name not in played),
            played=played,
        )


def write_model_card(
    folder: Path,
    *,
    algorithm: str,
    base_model: str,
    log_history: Sequence[dict[str, Any]],
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: Sequence[str] = (),
    facts: RunFacts = RunFacts(),
) -> None:
    """Write `README.md`: what the model is, how to load it, what decided its training, metrics, how to reproduce it.

    Args:
        folder: The folder in which the model is saved.
        algorithm: The algorithm's name in the registry.
        base_model: The name of the base model. It is left out if it is a local path.
        log_history: HuggingFace's log; the card shows the last value of each metric.
        model_name: The title. By default, it names the base model and the method.
        dataset_name: The dataset that was trained on. It is left out if it is a local path.
        tags: More tags.
        facts: What else is known of the training.
    """
    is_adapter = (folder / "adapter_config.json").is_file()
    base = base_model if _is_on_hub(base_model) else None
    dataset = dataset_name if dataset_name is not None and _is_on_hub(dataset_name) else None
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-classification" if algorithm == "reward" else "text-generation",
        tags=list(dict.fromkeys(["generated_from_trainer", "prefrl", algorithm, *tags])),
        base_model=base,
        datasets=None if dataset is None else [dataset],
    )
    of_base = "Model" if base is None else f"{base.rpartition('/')[2]},"
    title = model_name or f"{of_base} trained {_title(algorithm)}"
    parts = {
        "": _summary(algorithm, base, dataset, facts, log_history),
        "How to use": _use(algorithm, is_adapter=is_adapter, is_chat=_is_chat(folder)),
        "What decides the update": _options(facts),
        "Metrics": _metrics(log_history),
        "How to reproduce": _reproduction(algorithm, base, dataset, facts, is_adapter=is_adapter),
        "Citation": _citation(algorithm),
    }
    sections = (f"## {name}\n\n{part}" if name else part for name, part in parts.items() if part)
    text = "\n".join([f"---\n{data.to_yaml()}\n---\n", f"# {_cell(title)}\n", *sections])
    path = folder / "README.md"
    path.unlink(missing_ok=True)  # it could be a link
    ModelCard(text).save(path)


def _title(algorithm: str) -> str:
    return _TITLES.get(algorithm, f"with {algorithm.upper()}")


def _linked(name: str | None, kind: str, *, folder: str = "") -> str:
    return f"{kind} that is not on the Hub" if name is None else f"[{name}](https://hf.co/{folder}{name})"


def _summary(
    algorithm: str, base: str | None, dataset: str | None, facts: RunFacts, log_history: Sequence[Mapping[str, Any]]
) -> str:
    """What the model is, in a table."""
    steps = max((int(entry.get("step", 0)) for entry in log_history), default=0)
    rows = {"Base model": _linked(base, "A model"), "Method": _PAPERS[algorithm], "Loss": _source(algorithm, facts)}
    rows["Data"] = _linked(dataset, "A dataset", folder="datasets/")
    if facts.num_rows is not None:
        rows["Data"] += f", {facts.num_rows:,} rows after preparation (hash of a sample: `{facts.data_hash}`)"
    for title, names in (("Reward functions", facts.rewards), ("Environment and tools", facts.played)):
        rows[title] = ", ".join(f"`{_cell(name)}`" for name in names)
    rows["Optimizer steps"] = f"{steps:,}" if steps else ""
    rows["Versions"] = _versions()
    return _table(("Property", "Value"), [(name, text) for name, text in rows.items() if text])


def _source(algorithm: str, facts: RunFacts) -> str:
    """The losses by name, with the papers that they come from."""
    names, table = facts.all.get("loss_type", []), _LOSSES.get(algorithm, {})
    found = [name for name in ([names] if isinstance(names, str) else names) if name in table]
    return "; ".join(f"`{name}` ({_with_link(table[name].source)})" for name in found)


def _with_link(source: str) -> str:
    return re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)


def _use(algorithm: str, *, is_adapter: bool, is_chat: bool) -> str:
    """Code that loads the model, and its limits."""
    kind = "SequenceClassification" if algorithm == "reward" else "CausalLM"
    package, name = ("peft", f"AutoPeftModelFor{kind}") if is_adapter else ("transformers", f"AutoModelFor{kind}")
    both = "from transformers import AutoTokenizer" if is_adapter else ""
    imports = f"from {package} import {name}" + (f"\n{both}" if both else ", AutoTokenizer")
    if algorithm == "reward":
        end = 'score = model(**tokenizer("A prompt and its response", return_tensors="pt")).logits[0, 0]'
        command = ""
    else:
        asked = (
            'messages = [{"role": "user", "content": "..."}]\n'
            "inputs = tokenizer.apply_chat_template(\n"
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"\n)'
            if is_chat
            else 'inputs = tokenizer("...", return_tensors="pt")'
        )
        end = (
            f"{asked}\noutput = model.generate(**inputs, max_new_tokens=200)\n"
            "print(tokenizer.decode(output[0], skip_special_tokens=True))"
        )
        own = "prefrl chat MODEL" if is_chat else "prefrl generate MODEL '...' --raw"
        command = f"In a terminal: `{own}`, where MODEL is this repository.\n\n"
    return f"""```python
{imports}

name = "MODEL"  # this repository, or its folder
tokenizer = AutoTokenizer.from_pretrained(name)
model = {name}.from_pretrained(name)
{end}
```

{command}The model was not checked for safety or for errors of fact, which it may have from its base model or its data.
"""


def _is_chat(folder: Path) -> bool:
    """Whether the tokenizer that is saved in the folder has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and "chat_template" in json.loads(config.read_text(encoding="utf-8"))


def _options(facts: RunFacts) -> str:
    """The best known of the options that decided the update."""
    if not facts.all:
        return ""
    rows = [(f"`{name}`", _cell(_written(value))) for name, value in facts.all.items()]
    return _table(("Option", "Value"), rows)


def _written(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _reproduction(algorithm: str, base: str | None, dataset: str | None, facts: RunFacts, *, is_adapter: bool) -> str:
    """The file of options, and what it lacks."""
    names = {"model_name_or_path": base or "...", "dataset_name": dataset or "..."}
    seed = {} if facts.seed is None else {"seed": facts.seed}
    rewards = {"reward_funcs": list(facts.rewards)} if facts.rewards else {}
    adapter = {"use_peft": True} if is_adapter else {}
    values = {**names, **adapter, **rewards, **facts.options, **seed}
    missing = [f"`{name}`" for name, value in names.items() if value == "..."]
    fill = f" Fill in {' and '.join(missing)}: what was trained on is not on the Hub." if missing else ""
    fill += " Write a reward that prefrl does not have as `file.py:function`." if facts.rewards else ""
    fill += " Name its class as `environment: file.py:Class`, or its tools in `tools`." if facts.played else ""
    lora = " Add the options of the adapter, which are in `adapter_config.json`." if is_adapter else ""
    text = (
        f"Save these options, which are the ones that differ from their defaults, as `run.yaml`, and run `prefrl "
        f"{algorithm} run.yaml` with prefrl {__version__}.{fill}{lora} Paths, and options whose values are texts, are "
        "left out."
    )
    options = yaml.safe_dump(values, sort_keys=False, allow_unicode=True).rstrip()
    return f"{textwrap.fill(text, 118)}\n\n```yaml\n{options}\n```\n"


def _metrics(log_history: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last logged value of each metric that describes the model, unless it was always 0."""
    values: dict[str, list[float]] = {}
    for entry in log_history:
        for name, value in entry.items():
            if isinstance(value, float) and (name in _SHOWN_ANYWAY or not name.startswith(_TECHNICAL)):
                values.setdefault(name, []).append(value)
    rows = [
        (_cell(name), f"{logged[0]:.6g}", f"{logged[-1]:.6g}")
        for name, logged in sorted(values.items())
        if any(logged)
    ]
    return _table(("Metric", "First logged", "Last logged"), rows) if rows else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _versions() -> str:
    return ", ".join(f"{name} {number}" for name, number in [("prefrl", __version__), *_installed()])


def _installed() -> list[tuple[str, str]]:
    return [(package, version(package)) for package in _PACKAGES]


def _citation(algorithm: str) -> str:
    entries = []
    if algorithm in _CITED:
        authors, title, year = _CITED[algorithm]
        found = re.search(r"arXiv (\d+\.\d+)", _PAPERS[algorithm])
        assert found is not None  # every paper in the table is on arXiv
        entries.append(
            f"@misc{{{algorithm},\n  title = {{{title}}},\n  author = {{{authors}}},\n  year = {{{year}}},\n"
            f"  eprint = {{{found[1]}}},\n  archivePrefix = {{arXiv}},\n  url = {{https://arxiv.org/abs/{found[1]}}},\n}}"
        )
    entries.append(
        "@software{prefrl,\n  title = {prefrl: post-training of language models},\n"
        f"  version = {{{__version__}}},\n}}"
    )
    return "```bibtex\n" + "\n\n".join(entries) + "\n```\n"


def _plain(value: Any) -> Any:
    """The value as JSON has it; text for what JSON does not have."""
    return json.loads(json.dumps(value, default=str))


def _is_shown(value: Any) -> bool:
    """Whether a value says nothing private: numbers, words, and lists and mappings of them."""
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, Mapping):
        return all(_is_shown(part) for pair in value.items() for part in pair)
    return all(map(_is_shown, value)) if isinstance(value, list) else True


def _is_on_hub(name: str) -> bool:
    return _NAME_ON_HUB.fullmatch(name) is not None and not Path(name).exists()


def _cell(text: str) -> str:
    """A name in a title or a cell of a Markdown table, where it is nothing but text."""
    return html.escape(printable(text)).replace("|", "&#124;").replace("\n", " ")
