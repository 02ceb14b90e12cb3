"""Router replay: in a mixture of experts, a pass uses the experts that another pass has chosen for the same tokens.

A sampler and a trainer round differently, and some of their routers then choose other experts, so that an importance
ratio compares two different networks. Here the sampler's choices travel with the tokens, and the trainer's routers
answer from that record. Only the choice is given: the weights of the experts are computed, with gradients, so routers
still learn.

No architecture is named. While a router's forward runs, a mode of torch watches the call of `torch.topk` that chooses
experts, and records or replaces its indices. Which modules do that is found by watching one pass, and a model is
accepted only if a trial shows that the replay of its own record changes no bit, and that of another record does.

The routes of a pass are a keyword argument of the model's forward, down to the attention of its layers, where they are
taken for the router that follows. Gradient checkpointing passes it again when it recomputes a layer.

The trainer can also record its own choices (`RouterReplay.recording`). The tokens of a batch then carry numbers where
routes would stand, so that whatever lays a batch out or cuts it also says whose experts it has run.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from prefrl.distributed import is_main, place_in_team, sum_over_team, team_size
from prefrl.errors import ConfigError
from prefrl.models.modes import eval_mode
from prefrl.types import TokenBatch

_log = logging.getLogger(__name__)

# Keyword argument of the forward of a model, its layers and their attention: the `Routes` of the pass.
ROUTES_KWARG = "prefrl_routes"
# Attributes of a router: its `_Router`, and the mode while its forward runs.
_ROUTER, _MODE = "_prefrl_router", "_prefrl_mode"
_TOPK: tuple[Any, ...] = (torch.topk, torch.Tensor.topk)
_NUM_TRIAL_TOKENS = 24


def routes_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype with a number for each expert and one for those that are `unknown`."""
    return torch.uint8 if num_experts < 2**8 else torch.int16


def unknown(dtype: torch.dtype) -> int:
    """What stands for unknown experts in routes of this dtype; see `types.unknown_routes`."""
    return torch.iinfo(dtype).max


@dataclass(eq=False)
class Routes:
    """The experts of all tokens of one pass, for L routers with k experts for each token.

    Args:
        owner: What prepared the routers. Those of a copy of the model do not hear of these routes.
        given: [T, L, k] experts to use; None: the routers choose, and their choices are recorded.
        numbers: [T] int64 the tokens of a `Record`, to which the choices are added; None: of none.
    """

    owner: RouterReplay
    given: Tensor | None = None
    numbers: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by router: [T, k] that it chose itself
    # By router: how many tokens have given experts, and for how many of these the router has chosen others.
    changed: dict[int, Tensor] = field(default_factory=dict)

    def answer(self, number: int, scores: Tensor, own: Any) -> Any:
        """What `torch.topk` returns to a router.

        Args:
            number: Of the router.
            scores: [T, E] of experts, or with more dimensions in front.
            own: What `torch.topk` has found in them.
        """
        if self.given is None:
            self.chosen[number] = own.indices.detach().flatten(0, -2)
            return own
        experts = given_experts(self.given[:, number], own.indices)
        # A recomputed layer writes the same numbers again.
        self.changed[number] = _count_changed(self.given[:, number], own.indices)
        return torch.return_types.topk((scores.gather(-1, experts), experts))

    @property
    def counts(self) -> Tensor:
        """[2] of `changed`, summed over routers."""
        return torch.stack(list(self.changed.values())).sum(0)

    def recorded(self) -> Tensor:
        """[T, L, k] what the routers chose."""
        chosen = [self.chosen[number] for number in sorted(self.chosen)]
        return torch.stack(chosen, 1).to(routes_dtype(self.owner.num_experts))


def given_experts(given: Tensor, own: Tensor) -> Tensor:
    """The `given` experts [T, k] in the shape of `own`, which take the place of unknown ones."""
    return torch.where(given == unknown(given.dtype), own.flatten(0, -2), given.long()).view_as(own)


def _count_changed(given: Tensor, own: Tensor) -> Tensor:
    """[2] tokens with given experts, and those for which the set of their `own` experts is another."""
    is_known = given[:, 0] != unknown(given.dtype)
    differs = (given.long().sort(-1).values != own.flatten(0, -2).sort(-1).values).any(-1)
    return torch.stack([is_known.sum(), (is_known & differs).sum()])


@dataclass(frozen=True)
class _Router:
    """A module whose forward chooses experts with `torch.topk`."""

    owner: RouterReplay
    number: int  # in the order in which they run
    call: int  # which of its calls of `torch.topk` chooses, counted from 1


class _TopK(TorchFunctionMode):
    """Records or replaces the experts that a router chooses, while its forward runs."""

    def __init__(self, router: _Router, routes: Routes) -> None:
        super().__init__()
        self.router, self.routes, self.num_calls = router, routes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.num_calls += 1
            if self.num_calls == self.router.call:
                return self.routes.answer(self.router.number, args[0], result)
        return result


class _Running(threading.local):
    """Of the layer that runs in a thread."""

    routes: Routes | None = None


_running = _Running()


# Hooks are functions of the module that they get: in a copy of the model, they act on the copy.


def _enter_layer(layer: nn.Module, args: Any) -> None:
    _running.routes = None


def _enter_part(part: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Of a layer; also if the layer is recomputed, which calls no hook of its own."""
    if ROUTES_KWARG in kwargs:
        _running.routes = kwargs.pop(ROUTES_KWARG)
    return args, kwargs


def _enter_router(router: nn.Module, args: Any) -> None:
    routes, own = _running.routes, vars(router)[_ROUTER]
    if routes is not None and routes.owner is own.owner:
        mode = _TopK(own, routes)
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        setattr(router, _MODE, mode)


def _leave_router(router: nn.Module, args: Any, output: Any) -> None:
    mode = vars(router).pop(_MODE, None)
    if mode is not None:
        mode.__exit__(None, None, None)


class Record:
    """The experts of the tokens of a batch, in the passes that run over its pieces.

    Args:
        batch: The tokens, P of prompts and N of responses.
    """

    def __init__(self, batch: TokenBatch) -> None:
        self._num_prompt = len(batch.prompt_ids)
        numbers = torch.arange(self._num_prompt + len(batch.response_ids), device=batch.device)[:, None, None]
        # The numbers stand where layouts expect routes, those of one layer with one expert.
        self.batch = batch.replace(
            prompt_routes=numbers[: self._num_prompt], response_routes=numbers[self._num_prompt :]
        )
        self._numbers: list[Tensor] = []
        self._chosen: list[Tensor] = []

    def add(self, routes: Routes) -> None:
        """The choices of a pass. Padding has the number that is `unknown`."""
        assert routes.numbers is not None
        is_token = routes.numbers != unknown(routes.numbers.dtype)
        self._numbers.append(routes.numbers[is_token])
        self._chosen.append(routes.recorded()[is_token])

    def routes(self, owner: RouterReplay) -> tuple[Tensor, Tensor]:
        """[P, L, k] and [N, L, k] the experts; unknown for tokens that were not run, as the last of a response is not.

        All processes of a team must call it: each has run a part of the tokens.
        """
        own = self.batch.response_ids.new_zeros(
            self.batch.num_tokens + self._num_prompt, len(owner.layers), owner.top_k
        )
        place, num_tokens = place_in_team(), len(own)
        ran = own.new_zeros(num_tokens, team_size())
        for numbers, chosen in zip(self._numbers, self._chosen, strict=True):
            own[numbers], ran[numbers, place] = chosen.long(), 1
        if team_size() > 1:  # a token that several have run has the experts of the first of them
            ran = sum_over_team(ran)
            own = sum_over_team(own * (ran.argmax(1) == place)[:, None, None])
        dtype = routes_dtype(owner.num_experts)
        whole = own.to(dtype).masked_fill(ran.sum(1)[:, None, None] == 0, unknown(dtype))
        return whole[: self._num_prompt], whole[self._num_prompt :]


class RouterReplay:
    """Record and replay of the routers of a model. `prove` has to come before the first pass with routes.

    Args:
        records: Whether the experts of old log-probs are those of the trainer's own pass, instead of the sampler's.
        is_required: Whether a model that cannot replay is an error; otherwise there is a warning, and routers choose.
    """

    def __init__(self, *, records: bool = False, is_required: bool = True) -> None:
        self.records, self.is_required = records, is_required
        self.is_refused = False  # the trial has failed, and that is no error
        self.layers: tuple[int, ...] = ()  # of each router, the number of its layer
        self.num_experts = self.top_k = 0
        self.counts: list[Tensor] | None = None  # see `Routes.counts`, of each pass; None: they are not kept
        self._record: Record | None = None  # to which the passes that run now add their choices

    @property
    def is_proven(self) -> bool:
        """Whether the model has passed the trial."""
        return bool(self.layers)

    def prove(self, model: PreTrainedModel) -> None:
        """Find the routers of a model, prepare them, and show by trial that they record and replay.

        It runs without gradients, in eval mode; weights, modes and random states do not change. If weights are
        partitioned, all ranks must call it, and run equally many passes.

        Args:
            model: Without wrappers of backends; with an adapter, the model that has it.

        Raises:
            ConfigError: The model is no mixture of experts, or its routers cannot be replayed; says why.
        """
        if self.is_proven or self.is_refused:
            return
        try:
            self._prove(model)
        except ConfigError as error:
            if self.is_required:
                raise
            self.is_refused = True
            if is_main():
                _log.warning("The experts of the sampler are not replayed in training: %s", error)

    def _prove(self, model: PreTrainedModel) -> None:
        with eval_mode(model), torch.no_grad():
            ids = _trial_ids(model)
            routers = _found_routers(model, ids, self)
            some = next(iter(routers.values()))
            self.num_experts, self.top_k = some.num_experts, some.top_k
            added = _add_hooks(model, routers)
            reason = _failure(model, ids, list(routers), self)
        if reason is not None:
            for hook in added:
                hook.remove()
            for name in routers:
                delattr(model.get_submodule(name), _ROUTER)
            raise _unsupported(model, reason)
        self.layers = tuple(_layer_of(model, name)[0] for name in routers)

    def of_layers(self, found: Tensor) -> Tensor:
        """[T, L, k] routes from the experts of all layers of the model, [T, layers, k], as vLLM counts them.

        Raises:
            ValueError: They are not those of this model.
        """
        if found.dim() != 3 or found.size(1) <= self.layers[-1] or found.size(2) != self.top_k:
            raise ValueError(
                f"experts have the shape {list(found.shape)}: must be {self.top_k} experts of each token in more than "
                f"{self.layers[-1]} layers"
            )
        routes = found[:, list(self.layers)]
        if routes.numel() and not 0 <= int(routes.min()) <= int(routes.max()) < self.num_experts:
            raise ValueError(f"experts are outside 0..{self.num_experts - 1}")
        return routes.to(routes_dtype(self.num_experts))

    @contextmanager
    def recording(self, batch: TokenBatch) -> Iterator[Record]:
        """Context in which passes over pieces of `Record.batch` are recorded, and nothing is replayed."""
        self._record = record = Record(batch)
        try:
            yield record
        finally:
            self._record = None

    def routes(self, given: Tensor | None) -> Routes | None:
        """Those of a pass over a batch with the routes `given`, [T, L, k]; None: it has none, or routers cannot."""
        if not self.is_proven:
            return None
        if self._record is None or given is None:
            return Routes(self, given)
        return Routes(self, numbers=given.flatten())

    def keep(self, routes: Routes) -> None:
        """Note what a pass has chosen or changed, if that is asked for."""
        if self._record is not None and routes.numbers is not None:
            self._record.add(routes)
        if self.counts is not None and routes.changed:
            self.counts.append(routes.counts)


def _unsupported(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(f"router_replay does not work for {_name(model)}: {reason}. Set router_replay=False.")


def _name(model: Any) -> str:
    return type(model.get_base_model() if hasattr(type(model), "get_base_model") else model).__name__


def _trial_ids(model: PreTrainedModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    vocab_size = model.config.get_text_config().vocab_size
    return torch.randint(vocab_size, (1, _NUM_TRIAL_TOKENS), generator=generator).to(model.device)


def found_routers(model: PreTrainedModel) -> str:
    """Which routers an outline of a model has, whose weights are not there, so that nothing can be tried.

    Raises:
        ConfigError: It has none, or they cannot be replayed.
    """
    # Outlines can compute the products of experts in this dtype only.
    model = copy.deepcopy(model).to(torch.bfloat16)
    ids = _trial_ids(model)
    # Without a mask of its own, a model would look for the ends of sequences, in numbers that an outline has not.
    mask = torch.ones(1, 1, ids.size(1), ids.size(1), dtype=torch.bool, device=ids.device)
    with torch.no_grad():
        found = _found_routers(model, ids, RouterReplay(), attention_mask=mask)
    some = next(iter(found.values()))
    kind = type(model.get_submodule(next(iter(found)))).__name__
    return (
        f"router_replay: {len(found)} routers ({kind}) choose {some.top_k} of {some.num_experts} experts; whether "
        "they replay is tried when training starts"
    )


@dataclass(frozen=True)
class _Found(_Router):
    num_experts: int
    top_k: int


def _found_routers(model: PreTrainedModel, ids: Tensor, owner: RouterReplay, **more: Tensor) -> dict[str, _Found]:
    """The modules that choose experts, by name, in the order in which they run.

    Raises:
        ConfigError: There is none, or one cannot be replayed.
    """
    calls = _calls_of_topk(model, input_ids=ids, **more)
    found: dict[str, _Found] = {}
    for name, of_module in calls.items():
        # The choice comes last, after that of groups of experts.
        chooses = [i for i, (shape, top_k) in enumerate(of_module) if shape[:-1].numel() == ids.numel() and top_k > 0]
        if chooses:
            shape, top_k = of_module[chooses[-1]]
            found[name] = _Found(owner, len(found), chooses[-1] + 1, shape[-1], top_k)
    if not found:
        raise _unsupported(model, "no module of it chooses experts for each token with torch.topk")
    sizes = {(router.num_experts, router.top_k) for router in found.values()}
    if len(sizes) > 1:
        kinds = ", ".join(f"{top_k} of {num_experts}" for num_experts, top_k in sorted(sizes))
        raise _unsupported(model, f"its routers choose different numbers of experts: {kinds}")
    for name in found:
        if _layer_of(model, name)[0] < 0:
            raise _unsupported(model, f"{name} is in none of its layers")
    return found


def _calls_of_topk(model: PreTrainedModel, **inputs: Tensor) -> dict[str, list[tuple[torch.Size, int]]]:
    """The shape of the scores and the number that is chosen in each call of `torch.topk`, by the module that calls."""
    calls: dict[str, list[tuple[torch.Size, int]]] = {}
    names = {module: name for name, module in model.named_modules()}
    running: list[nn.Module] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in _TOPK and running:
                calls.setdefault(names[running[-1]], []).append((args[0].shape, result.indices.size(-1)))
            return result

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    hooks = []
    for module in model.modules():
        hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        with Watch():
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _layer_of(model: nn.Module, name: str) -> tuple[int, str]:
    """The number and name of the layer that a module is in; -1 if it is in none. Layers are elements of a list."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList):
            return int(parts[i]), ".".join(parts[: i + 1])
    return -1, ""


def _add_hooks(model: nn.Module, routers: Mapping[str, _Found]) -> list[Any]:
    """Prepare routers and their layers, unless they are those of a copy of a model that was prepared."""
    hooks = []
    layers = {_layer_of(model, name)[1] for name in routers}
    for name, router in routers.items():
        module = model.get_submodule(name)
        if _ROUTER in vars(module):
            layers.discard(_layer_of(model, name)[1])
        else:
            hooks += [
                module.register_forward_pre_hook(_enter_router),
                module.register_forward_hook(_leave_router, always_call=True),
            ]
        setattr(module, _ROUTER, _Router(router.owner, router.number, router.call))
    for layer in map(model.get_submodule, sorted(layers)):
        hooks.append(layer.register_forward_pre_hook(_enter_layer))
        hooks += [part.register_forward_pre_hook(_enter_part, with_kwargs=True) for part in layer.children()]
    return hooks


def _failure(model: PreTrainedModel, ids: Tensor, routers: Sequence[str], owner: RouterReplay) -> str | None:
    """Why the replay of a model cannot be trusted; None if it can."""

    def logits(routes: Routes) -> Tensor:
        found: Tensor = model(input_ids=ids, use_cache=False, **{ROUTES_KWARG: routes}).logits
        return found

    record = Routes(owner)
    try:
        plain = logits(record)
    except TypeError as error:
        return f"its forward does not take the routes as a keyword argument: {error}"
    if missing := [name for number, name in enumerate(routers) if number not in record.chosen]:
        return f"no module of the layer with {missing[0]} is passed the keyword arguments of its forward"
    if any(chosen.size(0) != ids.numel() for chosen in record.chosen.values()):
        return "its routers see other tokens than its input has, as with PEFT prompt learning"
    own = record.recorded()
    if not torch.equal(logits(Routes(owner, own)), plain):
        return "with the experts that its routers have chosen, its logits are others than without a record"
    changed = logits(Routes(owner, ((own.long() + 1) % owner.num_experts).to(own.dtype)))
    if not changed.isfinite().all() or torch.equal(changed, plain):
        kind = type(model.get_submodule(routers[0])).__name__
        return f"other experts in the record of its routers ({kind}) do not change its logits, or make them infinite"
    return None
