"""Every trainer makes the CPU's update on another device, too, and waits for it only where it has to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefrl.registry import REGISTRY
from tests.launch import launch

# Of the update, from the CPU's: attention adds up in another order there.
TOLERANCE = 1e-3
PLACE, LIBRARY = 1, 3  # of a wait, see tests/pretend.py
NAMES = list(REGISTRY)
GROUPS = [NAMES[:7], NAMES[7:10], NAMES[10:]]  # about equally long

_MASKS = "transformers.masking_utils:_ignore_causal_mask_sdpa"
# Places within forward and backward at which the host may wait after the first step, by the options they need.
INSIDE = {
    "padded": {_MASKS: "transformers looks whether a padding mask masks anything; only the padded plan has one"},
    "images": {
        "transformers.": "vision towers of transformers read the sizes of images",
        "backward": "and index by tensors of the host, which autograd does, too",
    },
}
# The same outside of forward and backward: module:function of prefrl -> why.
OUTSIDE = {
    "distributed.processes:gather_numbers": "the guard reads loss and gradient norm before it lets an update happen",
    "distributed.shards:first_non_finite": "weights are looked at before they are saved and at the end",
    "generation.local.generator:_decode": "sampling has to know which rows have ended, once for each position",
    "generation.local.generator:completions": "completions are text for rewards, once for each batch",
    "losses.scores:<lambda>": "scores of a rollout go to the buffer on the host, once for each batch",
    "metrics:<genexpr>": "metrics are read when they are logged",
    "models.critic:save": "a checkpoint is written",
    "models.fingerprint:<genexpr>": "an adapter is looked at once, when the trainer is made",
    "models.fingerprint:_of": "weights are hashed when a reference or a checkpoint has to be recognized",
    "models.scoring:_score": "in local generation and at the first use of a model, transformers looks at its masks",
    "models.scoring:forward": "in local generation and at the first use of a model, transformers looks at its masks",
    "models.selfcheck:_relative_error": "a forward plan is compared at the first use of a model",
    "models.selfcheck:mistake": "a forward plan is compared at the first use of a model",
    "trainer.base.resumable:_maybe_log_save_evaluate": "HuggingFace reads the loss when it is logged",
    "trainer.base.resumable:_save": "a checkpoint is written",
    "trainer.base.scorer:_with_values": "values of a rollout go to the buffer on the host, once for each batch",
    "trainer.base.sized:_inner_training_loop": "HuggingFace reads the mean loss at the end",
    "trainer.kto_trainer:_estimated_kl": "the loss of KTO needs the KL of the whole step, once for each step",
    "trainer.offline.running_mean:fold": "BCO's running mean of rewards, once for each step",
}


@pytest.mark.parametrize("algorithms", GROUPS, ids=lambda names: names[0])
def test_the_update_is_that_of_the_cpu_and_waits_have_reasons(algorithms: list[str], tmp_path: Path) -> None:
    outcomes = _run(tmp_path, *algorithms)
    assert len(outcomes) >= 10 * len(algorithms)
    assert {key: found["error"] for key, found in outcomes.items() if found["error"]} == {}
    assert {key: found["difference"] for key, found in outcomes.items() if not found["difference"] < TOLERANCE} == {}
    for (algorithm, options), found in outcomes.items():
        reasons = INSIDE.get(options, {})
        inside = [wait[LIBRARY] if wait[PLACE] else "backward" for wait in found["inside"]]
        assert [place for place in inside if not place.startswith(tuple(reasons))] == [], (algorithm, options)
        assert {wait[PLACE] for wait in found["outside"]} <= {*OUTSIDE, ""}, (algorithm, options)


def test_a_fault_in_a_loss_is_an_error_or_a_wait(tmp_path: Path) -> None:
    outcomes = _run(tmp_path)
    assert len(outcomes) >= 10
    found = {name: outcome["error"] or outcome["inside"] for (_, name), outcome in outcomes.items()}
    assert {name for name, what in found.items() if not what} == set()
    assert {name for name, what in found.items() if isinstance(what, str)} == {
        "a tensor of the host is added",
        "a matrix of the host is multiplied",
        "numpy",
    }


def _run(folder: Path, *algorithms: str) -> dict[tuple[str, str], dict[str, Any]]:
    """In a process of its own, in which the device is an accelerator."""
    file = folder / "outcomes.pt"
    found: dict[tuple[str, str], dict[str, Any]] = launch(
        "tests.contract.pretend_worker", file, *algorithms, result=file, num_processes=1
    )
    return found
