"""Writes the model card, the README.md of a saved model."""

from __future__ import annotations

import dataclasses
import html
import json
import re
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
_NAME_ON_HUB = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
_PACKAGES = ("transformers", "torch", "datasets", "tokenizers")
# What a run needs besides the options that decide its updates.
_SIZES = ("max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps")
_WORD = re.compile(r"[\w.+-]{1,40}", re.ASCII)  # no path, no URL, no sentence


@dataclass(frozen=True)
class RunFacts:
    """What the card says about the training itself. It has no paths, no secrets and no text of the data."""

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # those that are not at their defaults
    seed: int | None = None
    num_rows: int | None = None  # of the prepared training dataset; None: a stream, or no training
    data_hash: str | None = None
    rewards: tuple[str, ...] = ()

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
        data = decisive.get("data") or {}
        return cls(
            {name: value for name, value in changed.items() if _is_shown(value) and masked(value, name) == value},
            seed=config.seed,
            num_rows=data.get("rows"),
            data_hash=data.get("hash"),
            rewards=tuple(decisive.get("rewards", ())),
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
    """Write `README.md`: use, method, data, options and command, last metrics, versions and citation.

    Args:
        folder: The folder in which the model is saved.
        algorithm: The algorithm's name in the registry.
        base_model: The name of the base model. It is left out if it is a local path.
        log_history: HuggingFace's log; the card shows the last value of each metric.
        model_name: The title; None: a general one.
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
    text = "\n".join(
        [
            f"---\n{data.to_yaml()}\n---\n",
            f"# {_cell(model_name or 'Model trained with prefrl')}\n",
            f"{_PAPERS[algorithm]}\n",
            f"## Use\n\n{_use(algorithm, is_adapter=is_adapter)}",
            f"## Data\n\n{_data(facts, dataset)}",
            f"## Training\n\n{_training(algorithm, base, dataset, facts, log_history)}",
            f"## Last logged values\n\n{_metrics(log_history)}",
            f"## Versions\n\n{_versions()}",
            f"## Citation\n\n{_citation(algorithm)}",
        ]
    )
    path = folder / "README.md"
    path.unlink(missing_ok=True)  # it could be a link
    ModelCard(text).save(path)


def _use(algorithm: str, *, is_adapter: bool) -> str:
    """Code that loads the model, and its limits."""
    kind = "SequenceClassification" if algorithm == "reward" else "CausalLM"
    package, name = ("peft", f"AutoPeftModelFor{kind}") if is_adapter else ("transformers", f"AutoModelFor{kind}")
    both = "from transformers import AutoTokenizer" if is_adapter else ""
    imports = f"from {package} import {name}" + (f"\n{both}" if both else ", AutoTokenizer")
    if algorithm == "reward":
        end = 'score = model(**tokenizer("A prompt and its response", return_tensors="pt")).logits[0, 0]'
    else:
        end = (
            'inputs = tokenizer("...", return_tensors="pt")  # a conversation: tokenizer.apply_chat_template\n'
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200)[0], skip_special_tokens=True))"
        )
    command = (
        "" if algorithm == "reward" else "In a terminal: `prefrl chat MODEL`, where MODEL is this repository.\n\n"
    )
    return f"""```python
{imports}

name = "MODEL"  # this repository, or its folder
tokenizer = AutoTokenizer.from_pretrained(name)
model = {name}.from_pretrained(name)
{end}
```

{command}The model was not checked for safety or for errors of fact, which it may have from its base model or its data.
"""


def _data(facts: RunFacts, dataset: str | None) -> str:
    named = "a dataset that is not on the Hub" if dataset is None else f"[{dataset}](https://hf.co/datasets/{dataset})"
    lines = [f"- training data: {named}"]
    if facts.num_rows is not None:
        lines.append(f"- rows after preparation: {facts.num_rows:,} (hash of a sample: `{facts.data_hash}`)")
    if facts.rewards:
        lines.append(f"- rewards: {', '.join(map(_cell, facts.rewards))}")
    return "\n".join(lines) + "\n"


def _training(
    algorithm: str,
    base: str | None,
    dataset: str | None,
    facts: RunFacts,
    log_history: Sequence[Mapping[str, Any]],
) -> str:
    names = {"model_name_or_path": base or "...", "dataset_name": dataset or "..."}
    seed = {} if facts.seed is None else {"seed": facts.seed}
    rewards = {"reward_funcs": list(facts.rewards)} if facts.rewards else {}
    options = yaml.safe_dump({**names, **rewards, **facts.options, **seed}, sort_keys=False, allow_unicode=True)
    step = max((int(entry.get("step", 0)) for entry in log_history), default=0)
    start = "a model that is not on the Hub" if base is None else f"[{base}](https://hf.co/{base})"
    return f"""{step:,} optimizer steps, from {start}. These are the options that differ from their defaults, as a file
for the command `prefrl {algorithm} --config run.yaml`:

```yaml
{options.rstrip()}
```

Paths, and options whose values are texts, are left out.
"""


def _metrics(log_history: Sequence[Mapping[str, Any]]) -> str:
    last: dict[str, Any] = {}
    for entry in log_history:
        last |= entry
    floats = {_cell(name): value for name, value in sorted(last.items()) if isinstance(value, float)}
    rows = "".join(f"| {name} | {value:.6g} |\n" for name, value in floats.items())
    return f"| metric | value |\n|---|---|\n{rows}"


def _versions() -> str:
    return "".join(f"- {name} {number}\n" for name, number in [("prefrl", __version__), *_installed()])


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
            f"  eprint = {{{found[1]}}},\n  archivePrefix = {{arXiv}},\n}}"
        )
    entries.append(f"@software{{prefrl,\n  title = {{prefrl}},\n  version = {{{__version__}}},\n}}")
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
