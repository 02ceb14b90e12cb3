"""Values of TRL and verl for `test_policy_losses.py`; both need to be installed.

python -m tests.golden.make_policy_losses tests/golden/policy_losses.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.golden.policy_cases import CONSTANT, PEER_CASES, PeerCase, Rows, rows_of


def padded(values: Tensor, rows: Rows) -> Tensor:
    """[B, longest row]."""
    return torch.nn.utils.rnn.pad_sequence(values.split(rows.lengths), batch_first=True)


def trl_values(case: PeerCase) -> dict[str, Any]:
    """Of a trainer without a model: its loss, with log-probs in place of a forward pass."""
    from trl.experimental.gmpo import GMPOTrainer
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = rows_of(case)
    mask = padded(rows.trainable, rows).double()
    logprobs = padded(rows.logprobs, rows)
    options = {
        "epsilon": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    } | case.peer_options
    trainer = object.__new__(GMPOTrainer if case.peer_loss == "gmpo" else GRPOTrainer)
    vars(trainer).update(
        options,
        args=SimpleNamespace(**options, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=case.peer_loss,
        epsilon_low=options["epsilon"],
        top_entropy_quantile=1.0,
        beta=0.0,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        max_completion_length=CONSTANT,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(mask), None),
    )
    ids = torch.zeros_like(mask).long()
    first = [sum(rows.lengths[:i]) for i in range(len(rows.lengths))]
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": rows.advantages[first],
            "old_per_token_logps": padded(rows.old_logprobs, rows),
            "sampling_per_token_logps": padded(rows.sampling_logprobs, rows),
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return {"loss": loss.item(), "gradient": rows.logprobs.grad.tolist(), "metrics": metrics}


class Options(SimpleNamespace):
    """Some of verl's losses ask for options as of a mapping."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def verl_values(case: PeerCase) -> dict[str, Any]:
    """Counts are of the whole batch, as verl's trainer passes them."""
    from verl.trainer.ppo import core_algos

    rows = rows_of(case)
    mask = padded(rows.trainable, rows).double()
    options = dict(case.peer_options)
    counts = {"dp_size": 1, "batch_num_tokens": mask.sum(), "global_batch_size": len(rows.lengths)}
    if "loss_scale_factor" in options:
        counts["loss_scale_factor"] = options.pop("loss_scale_factor")
    mode = options.pop("loss_agg_mode", "token-mean")
    policy_loss = Options(**options.pop("policy_loss", {}))
    config = object.__new__(core_algos.ActorConfig)  # its constructor asks for the size of a cluster
    for name, value in {**options, "global_batch_info": counts, "policy_loss": policy_loss}.items():
        object.__setattr__(config, name, value)
    function = {"reinforce": core_algos.compute_policy_loss_reinforce}.get(case.peer_loss)
    function = function or core_algos.get_policy_loss_fn(case.peer_loss)
    old, new, advantages = (padded(x, rows) for x in (rows.old_logprobs, rows.logprobs, rows.advantages))
    loss, metrics = function(old, new, advantages, mask, mode, config)
    loss.backward()
    return {"loss": loss.item(), "gradient": rows.logprobs.grad.tolist(), "metrics": metrics}


def main() -> None:
    import trl
    import verl

    torch.set_default_dtype(torch.float64)  # TRL picks temperatures from Python numbers in the default dtype
    make = {"trl": trl_values, "verl": verl_values}
    values = {name: make[case.peer](case) for name, case in PEER_CASES.items()}
    document = {"trl": trl.__version__, "verl": verl.__version__, "torch": torch.__version__, "values": values}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
