"""Inputs on which prefrl and TRL are compared."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from prefrl.registry import REGISTRY
from tests.assets import tiny_model, tiny_reward_model, tiny_tokenizer
from tests.contract.cases import dataset_of

__all__ = ["AGREEMENT_CASES", "AgreementCase", "Inputs", "inputs_of", "model_beside", "prefrl_values"]


@dataclass(frozen=True)
class AgreementCase:
    """A trainer with options; `prefrl` are those that have another name or value here."""

    trainer: str
    trl_options: dict[str, Any] = field(default_factory=dict)
    prefrl: dict[str, Any] = field(default_factory=dict)
    differs_because: str | None = None
    # Responses of equal lengths: the order of pairs by the policy's margins differs from that by the reference's.
    is_even: bool = False
    # The trainer of TRL, if it has another name; GKD's rows are conversations in one column, SDFT's have a hint.
    peer: str | None = None
    trl: dict[str, Any] = field(default_factory=dict)  # options of TRL's trainer alone


@dataclass(frozen=True)
class Inputs:
    """What both libraries get."""

    model: PreTrainedModel
    reference: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerFast
    rows: Dataset


def inputs_of(case: AgreementCase) -> Inputs:
    """8 ragged rows of text, each with a prompt of its own; policy and reference or teacher are random models."""
    rows = Dataset.from_list(EVEN_PAIRS) if case.is_even else dataset_of(case.trainer, 8)
    if case.peer == "GKD":
        rows = dataset_of("sft", 8).map(_as_messages, remove_columns=["prompt", "completion"])
    if case.peer == "SDFT":
        rows = rows.rename_column("hint", "privileged_context")
    has_reference = case.trainer in ("dpo", "kto", "bco", "distillation") and case.peer != "SDFT"
    width = {"hidden_size": 24} if case.trainer == "distillation" else {}
    return Inputs(
        model=tiny_reward_model() if case.trainer == "reward" else tiny_model(),
        reference=tiny_model(seed=5, **width) if has_reference else None,
        tokenizer=tiny_tokenizer(chat_template=_TEMPLATE if case.peer == "GKD" else None),
        rows=rows,
    )


_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def _as_messages(row: dict[str, str]) -> dict[str, Any]:
    roles = {"prompt": "user", "completion": "assistant"}
    return {"messages": [{"role": role, "content": row[column]} for column, role in roles.items()]}


def _split(row: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}


def _with_context(row: dict[str, str]) -> str:
    return f"{row['prompt']}\n\n{row['privileged_context']}"


def model_beside(case: AgreementCase, inputs: Inputs) -> dict[str, PreTrainedModel]:
    """The argument that gives the reference or the teacher, if there is one."""
    name = "teacher_model" if case.trainer == "distillation" else "ref_model"
    return {} if inputs.reference is None else {name: inputs.reference}


def prefrl_values(case: AgreementCase, inputs: Inputs | None = None) -> dict[str, float]:
    """Loss, gradient norm and metrics of the first step, from those inputs or the case's own."""
    inputs = inputs or inputs_of(case)
    row = REGISTRY[case.trainer]
    with tempfile.TemporaryDirectory() as folder:
        args = row.load_config()(
            **{
                "output_dir": folder,
                "max_steps": 1,
                "per_device_train_batch_size": len(inputs.rows),
                "learning_rate": 1e-3,
                "optim": "sgd",
                "max_grad_norm": 1e9,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "use_cpu": True,
                **case.trl_options,
                **case.prefrl,
            }
        )
        rows = inputs.rows.map(_split, remove_columns=["messages"]) if case.peer == "GKD" else inputs.rows
        extra = model_beside(case, inputs)
        trainer = row.load_trainer()(
            inputs.model, args=args, train_dataset=rows, processing_class=inputs.tokenizer, **extra
        )
        trainer.train()
        return dict(trainer.state.log_history[0])


EVEN_PAIRS = [
    {"prompt": f"{word}?", "chosen": word[::-1], "rejected": word}
    for word in ("stone", "bread", "light", "flame", "crown", "plant", "quick", "month")
]


def _dpo(**options: Any) -> AgreementCase:
    return AgreementCase("dpo", options)


AGREEMENT_CASES: dict[str, AgreementCase] = {
    **{
        f"dpo {loss}": _dpo(loss_type=[loss])
        for loss in (
            "sigmoid",
            "hinge",
            "ipo",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "apo_zero",
            "apo_down",
            "discopop",
            "sft",
            "sigmoid_norm",
        )
    },
    **{f"dpo {loss} smoothed": _dpo(loss_type=[loss], label_smoothing=0.1) for loss in ("exo_pair", "robust")},
    **{
        f"dpo {loss}{' smoothed' if e else ''}": AgreementCase(
            "dpo", {"loss_type": [loss], "label_smoothing": e}, is_even=True
        )
        for loss in ("aot", "aot_unpaired")
        for e in (0.0, 0.1)
    },
    "dpo sigmoid even": AgreementCase("dpo", is_even=True),
    **{
        f"dpo {divergence}": _dpo(f_divergence_type=divergence)
        for divergence in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    "dpo several": _dpo(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "dpo ld": _dpo(ld_alpha=0.3),
    "dpo wpo": _dpo(use_weighting=True),
    "kto": AgreementCase("kto", {"desirable_weight": 1.5}),
    "kto apo_zero_unpaired": AgreementCase("kto", {"loss_type": "apo_zero_unpaired"}),
    "reward": AgreementCase("reward"),
    "reward centered": AgreementCase("reward", {"center_rewards_coefficient": 0.1}),
    "sft": AgreementCase("sft"),
    "sft dft": AgreementCase("sft", {"loss_type": "dft"}),
    **{f"cpo {loss}": AgreementCase("cpo", {"loss_type": loss}) for loss in ("sigmoid", "hinge", "ipo", "simpo")},
    "cpo alphapo": AgreementCase("cpo", {"loss_type": "alphapo", "alpha": 0.25}),
    # The most likely tokens are sampled, so that both get the same completions.
    **{
        f"distillation {beta}": AgreementCase("distillation", {"beta": beta, "top_k": 1, "max_completion_length": 12})
        for beta in (0.0, 0.5, 1.0)
    },
    **{
        f"gkd {beta}": AgreementCase("distillation", {"beta": beta, "lmbda": 0.0}, peer="GKD")
        for beta in (0.0, 0.5, 1.0)
    },
    # All completions have 12 tokens: TRL averages over the tokens of each row, then over rows.
    **{
        f"sdft {beta}": AgreementCase(
            "distillation",
            {"top_k": 1, "max_completion_length": 12, "num_generations": 1},
            {"beta": beta, "teacher_weights": "live", "teacher_prompt": _with_context},
            peer="SDFT",
            trl={"distillation_alpha": beta, "teacher_model_kind": "live", "distillation_mode": "full_logits"},
        )
        for beta in (0.0, 0.5, 1.0)
    },
    "orpo": AgreementCase("orpo", differs_because="TRL's NLL spans prompt and response, the paper's the response"),
}
