"""Reads partitioned weights as rank 0 would to send them: `export_worker RESULT BACKEND...`, on two processes.

Rank 0 writes the file `RESULT`: for each backend the differences found, for each case and each way of reading it.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from prefrl import distributed
from prefrl.distributed import Differences
from prefrl.generation.weights.delta import HostCopy
from prefrl.models.critic import HeadCritic
from prefrl.models.export import PolicyWeights
from prefrl.trainer.ppo_critic import attach_critic
from tests.assets import tiny_model
from tests.contract.cases import make_trainer
from tests.distributed.backends import enter, leave_training
from tests.unit.models.test_export import MERGED, PLAIN, adapted

SECONDS_FOR_A_CASE = 120
# Each of so many cases is also read by all ranks at once, after breaking off and after a pass.
THOROUGH = 3
# accelerate's way to FSDP2 would partition these embeddings twice.
IMPOSSIBLE = {"fsdp2": ("tied tokens",)}
# Partitioned like others here. What else they are is seen in whole weights, in tests/unit/models/test_export.py.
LIKE_OTHERS = ("llama", "rslora", "all-linear")
Named = tuple[str, Tensor]


def cases() -> Iterator[tuple[str, Callable[[], PreTrainedModel]]]:
    """Names, and what makes the model of each."""
    for case in PLAIN:
        architecture, options, _ = case.values
        yield str(case.id), lambda a=architecture, o=options: tiny_model(a, **o)
    for case in MERGED:
        architecture, model_options, options = case.values
        yield str(case.id), lambda a=architecture, m=model_options, o=options: adapted(tiny_model(a, **m), o)


def differences(found: Iterable[Named], expected: Iterable[Named]) -> list[str]:
    """Names of weights that are missing, too many, there twice or not bit-equal."""
    pairs = [(name, tensor.clone()) for name, tensor in found]
    names, wanted = [name for name, _ in pairs], dict(expected)
    wrong = [name for name, tensor in pairs if name in wanted and not tensor.equal(wanted[name])]
    twice = [name for name in names if names.count(name) > 1]
    return sorted({*(set(names) ^ wanted.keys()), *wrong, *twice})


def to_bfloat16(dtype: torch.dtype, num_dims: int) -> torch.dtype:
    return torch.bfloat16 if num_dims > 1 and dtype.is_floating_point else dtype


class Run:
    """One model, partitioned, and what it should be read as.

    Args:
        model: Partitioned.
        twin: The same model, whole.
        folder: Where adapters are written.
    """

    def __init__(self, model: PreTrainedModel, twin: PreTrainedModel, folder: Path) -> None:
        self.model, self.twin, self.folder = model, twin, folder
        self.weights, self.expected = PolicyWeights(model), PolicyWeights(twin)

    def led(self, read: Callable[[], list[str]]) -> list[str]:
        """What rank 0 finds wrong."""
        found: list[list[str]] = []
        self.weights.lead(lambda: found.append(read()))
        assert len(found) == (1 if distributed.is_main() else 0)
        return found[0] if found else []

    def all_weights(self) -> list[str]:
        return differences(self.weights, self.expected)

    def base(self) -> list[str]:
        return differences(self.weights.base(), self.expected.base())

    def changes(self) -> list[str]:
        """What a copy of other weights becomes by the changes that are sent to it."""
        trainers, servers = HostCopy(), HostCopy()
        others = [(name, tensor.clone()) for name, tensor in self.expected]
        for number, (_, tensor) in enumerate(others):
            if number % 2:
                tensor.view(-1)[:: 1 + 2 * number] += 1
        servers.apply([dict(trainers.changes(others, dtype=None))])
        message = dict(trainers.changes(self.weights, dtype=None))
        unchanged = {name for name, _ in others[::2]}
        servers.apply([message])
        return differences(servers.weights.items(), self.expected) + sorted(unchanged & message.keys())

    def compared(self) -> list[str]:
        """What a copy becomes if ranks compare their parts, in several steps of which one breaks off."""
        trainers, servers, wrong = HostCopy(), HostCopy(), list[str]()
        random, compared = torch.Generator().manual_seed(0), list[Differences]()

        def watched(found: Iterable[tuple[str, Tensor | Differences]]) -> Iterator[tuple[str, Tensor | Differences]]:
            for name, one in found:
                compared.extend([one] if isinstance(one, Differences) else [])
                yield name, one

        for number in range(6):
            for own, twin in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                change = 0.1 * torch.randn(twin.shape, generator=random)
                with torch.no_grad():
                    twin += change * (torch.rand(twin.shape, generator=random) < 0.02)
                distributed.load_whole(own, twin.detach())

            def follow(number: int = number) -> None:
                is_first = trainers.fingerprint is None
                found = watched(self.weights.changes(to_bfloat16, is_first=is_first))
                message = trainers.changes(found, dtype=torch.bfloat16)
                if number == 3:
                    next(message)  # and no more: then all weights are sent
                    return
                servers.apply([dict(message)])
                rounded = ((n, t.bfloat16() if t.dim() > 1 and t.is_floating_point() else t) for n, t in self.expected)
                wrong.extend(differences(servers.weights.items(), rounded))

            self.weights.lead(follow)
        # With an adapter, all that ZeRO-3 partitions here may be in its layers, which are gathered to be merged.
        is_compared = compared or hasattr(self.model, "peft_config") or not distributed.is_main()
        return wrong if is_compared else [*wrong, "nothing was compared"]

    def adapter(self) -> list[str]:
        """The files that are written."""
        if not hasattr(self.model, "peft_config"):
            return []
        contents = []
        for name, weights in (("partitioned", self.weights), ("whole", self.expected)):
            weights.save_adapter(self.folder / name)
            contents.append(load_file(self.folder / name / "adapter_model.safetensors"))
        return differences(*(content.items() for content in contents))


def run(
    make: Callable[[], PreTrainedModel],
    partition: Callable[[PreTrainedModel], None],
    folder: Path,
    *,
    is_thorough: bool,
) -> dict[str, list[str]]:
    """What is wrong with each way of reading a model."""
    leave_training()
    model, twin = make(), make()
    for each in (model, twin):
        attach_critic(each, HeadCritic(each, detach_trunk=False))
    partition(model)
    assert distributed.is_sharded(model)
    assert not distributed.is_sharded(twin)
    of = Run(model, twin, folder)
    found = {"all": of.led(of.all_weights), "base": of.led(of.base), "adapter": of.led(of.adapter)}
    found["changes"] = of.led(of.changes)
    if not is_thorough:
        return found
    return found | {
        "by all ranks at once": of.all_weights(),
        "after breaking off": broken_off(of),
        "after a pass": after_a_pass(of),
        "compared": of.compared(),  # the last, because it changes the weights
    }


def broken_off(of: Run) -> list[str]:
    """Rank 0 stops in the middle, fails, reads nothing, and begins again."""
    kept: list[Iterator[Named]] = []

    def stop_and_begin_again() -> list[str]:
        for number in (1, 4, 6):
            kept.append(iter(of.weights))
            for _ in range(number):
                next(kept[-1])
        kept.pop()
        return of.all_weights()

    def fail() -> None:
        next(iter(of.weights))
        raise LookupError("no such server")

    found = of.led(stop_and_begin_again)
    try:
        of.weights.lead(fail)
    except LookupError:
        assert distributed.is_main()
    else:
        assert not distributed.is_main()
    of.weights.lead(lambda: None)
    return found + of.led(of.all_weights)


def after_a_pass(of: Run) -> list[str]:
    """Weights that a pass has gathered, and nothing has released."""
    for module in of.model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
    with torch.no_grad():
        of.model(input_ids=torch.arange(5, 25)[None])
    return of.led(of.all_weights)


def read(backend: str, folder: Path) -> dict[str, dict[str, list[str]]]:
    """All cases, one after another."""
    folder.mkdir(exist_ok=True)
    options = enter(backend, folder)
    accelerator = make_trainer("sft", folder / "run", **options).accelerator
    results = {}
    for number, (name, make) in enumerate(cases()):
        if name in (*LIKE_OTHERS, *IMPOSSIBLE.get(backend, ())):
            continue
        faulthandler.dump_traceback_later(SECONDS_FOR_A_CASE, exit=True)
        print(f"{backend}: case {name}", file=sys.stderr, flush=True)
        if accelerator.is_fsdp2:  # set for the trainer's model
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = None
        results[name] = run(
            make,
            lambda model: distributed.prepare_frozen(accelerator, model),
            folder / name,
            is_thorough=number % THOROUGH == 0,
        )
    faulthandler.cancel_dump_traceback_later()
    return results


def main(result: Path, backends: list[str]) -> None:
    """One backend after another."""
    results = {backend: read(backend, result.parent / backend) for backend in backends}
    if distributed.is_main():
        torch.save(results, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
