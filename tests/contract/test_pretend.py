"""Every trainer makes the CPU's update on another device, too, and waits for it only where it has to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from prefrl.registry import REGISTRY
from tests.contract.cases import REPRESENTATIVES
from tests.launch import launch

# Of the update, from the CPU's: attention adds up in another order there.
TOLERANCE = 1e-4
PLACE, LIBRARY = 1, 3  # of a wait, see tests/pretend.py
NAMES = list(REGISTRY)
# At least so many sets of options.
NUM_RUNS = {**dict.fromkeys(REPRESENTATIVES, 3), "sft": 6, "grpo": 6}
GROUPS = [NAMES[:8], NAMES[8:]]  # about equally long

_MASKS = "transformers.masking_utils:_ignore_causal_mask_sdpa"
# Places within forward and backward at which the host may wait after the first step, by the options they need.
INSIDE = {
    "padded": {_MASKS: "transformers looks whether a padding mask masks anything; only the padded plan has one"},
    "images": {
        "transformers.": "vision towers of transformers read the sizes of images",
        "backward": "and index by tensors of the host, which autograd does, too",
    },
}
# The same outside of forward and backward: an algorithm in which it happens -> module:function of prefrl -> why.
OUTSIDE = {
    "sft": {
        "distributed.shards:first_non_finite": "weights are looked at before they are saved and at the end",
        "metrics:<genexpr>": "metrics are read when they are logged",
        "models.scoring:_score": "transformers looks at its masks in local generation and at the first use of a model",
        "models.scoring:forward": "as above, and a cache of local generation is made",
        "models.selfcheck:mistake": "a forward plan is compared at the first use of a model",
        "trainer.features.guard:after_update": "the guard reads loss and gradient norm, after the update is queued",
        "trainer.features.guard:before_update": "as above, before an update that the device cannot leave out",
        "trainer.loop:__init__": "the model is moved to the device",
        "trainer.loop:_load_from_checkpoint": "a checkpoint is read",
        "trainer.loop:_maybe_log_save_evaluate": "HuggingFace reads the loss when it is logged",
        "trainer.loop:_save": "a checkpoint is written",
        "trainer.loop:_inner_training_loop": "HuggingFace reads the mean loss at the end",
    },
    "reward": {"models.selfcheck:_relative_error": "a forward plan is compared at the first use of a model"},
    "dpo": {
        "models.fingerprint:<genexpr>": "an adapter is looked at once, when the trainer is made",
        "models.fingerprint:_of": "weights are hashed when a reference or a checkpoint has to be recognized",
        "scripts.replay:_pass": "a step is computed again, and its numbers are printed",
        "trainer.dumps:_write": "a step that is not finite is written down",
    },
    "kto": {
        "losses.per_token:<lambda>": "scores that are computed once before training, or for each rollout, are kept"
    },
    "bco": {
        "trainer.offline.rows:load": "a checkpoint is read",
        "trainer.offline.rows:save": "a checkpoint is written",
    },
    "grpo": {
        "generation.local.generator:_decode": "sampling has to know which rows have ended, once for each position",
        "generation.local.generator:completions": "completions are text for rewards, once for each batch",
    },
    "ppo": {
        "distributed.shards:load_whole": "a checkpoint is read",
        "models.critic:__init__": "the critic is moved to the device",
        "models.critic:save": "a checkpoint is written",
        "trainer.scorer:_with_values": "values of a rollout go to the buffer on the host, once for each batch",
    },
    "distillation": {"models.reference:_go_to": "the teacher is moved to the device"},
}


@pytest.mark.parametrize("algorithms", GROUPS, ids=lambda names: names[0])
def test_the_update_is_that_of_the_cpu_and_waits_have_reasons(algorithms: list[str], tmp_path: Path) -> None:
    outcomes = _run(tmp_path, *algorithms)
    for name in algorithms:
        assert sum(algorithm == name for algorithm, _ in outcomes) >= NUM_RUNS.get(name, 1), name
    assert {key: found["error"] for key, found in outcomes.items() if found["error"]} == {}
    assert {key: found["difference"] for key, found in outcomes.items() if not found["difference"] < TOLERANCE} == {}
    allowed = {"", *(place for places in OUTSIDE.values() for place in places)}
    seen: dict[str, set[str]] = {}  # in an algorithm, or with options
    for (algorithm, options), found in outcomes.items():
        inside, outside = {_asked(wait) for wait in found["inside"]}, {wait[PLACE] for wait in found["outside"]}
        reasons = INSIDE.get(options, {})
        assert [place for place in inside if not place.startswith(tuple(reasons))] == [], (algorithm, options)
        assert outside <= allowed, (algorithm, options)
        seen.setdefault(algorithm, set()).update(outside)
        seen.setdefault(options, set()).update(inside)
    # A reason of what happens no longer is wrong.
    for algorithm in algorithms:
        assert OUTSIDE.get(algorithm, {}).keys() <= seen[algorithm], algorithm
    for options in INSIDE.keys() & seen.keys():
        assert [place for place in INSIDE[options] if not any(p.startswith(place) for p in seen[options])] == []


def _asked(wait: Sequence[Any]) -> str:
    return str((wait[LIBRARY] or wait[PLACE]) if wait[PLACE] else "backward")


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
