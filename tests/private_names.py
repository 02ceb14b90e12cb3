"""What prefrl takes from other libraries although any release may drop it: private names, and what it tells vLLM.

`PRIVATE` lists the private names. `tests/unit/test_private_names.py` compares it with the code, and looks up each of
them, and each name that is imported, in what is installed. vLLM is installed elsewhere and slow to import, so that its
names are looked up in its sources: by `tests/vllm/test_private_names.py`, and for any other release by
`python -m tests.private_names FOLDER`, where FOLDER has the folder `vllm` of its wheel.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from pkgutil import resolve_name
from textwrap import dedent

from prefrl.generation.server import INFO_PATH
from prefrl.scripts.launch.vllm_serve import CONTRACT, CPU_FLAGS, REFUSED

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "prefrl").rglob("*.py"))

# Who has them: a module, or a class in it, after a colon. If one is gone after an upgrade, read what has become of it
# before you change its users.
PRIVATE: dict[str, tuple[str, ...]] = {
    "argparse": ("_StoreFalseAction",),
    "argparse:ArgumentParser": ("_actions", "_check_value", "_get_value", "_option_string_actions"),
    "argparse:HelpFormatter": ("_expand_help", "_fill_text", "_format_action_invocation"),
    "os": ("_exit",),
    "sys": ("_base_executable", "_current_frames"),
    "typing:Protocol": ("_is_protocol",),
    "transformers.cli.serving.utils": ("_RESPONSE_TEMPLATE_FALLBACKS",),
    "transformers.hf_argparser:HfArgumentParser": ("_add_dataclass_arguments",),
    "transformers.integrations.deepspeed": ("_hf_deepspeed_config_weak_ref",),
    "transformers:AutoModel": ("_model_mapping",),
    "transformers:PreTrainedConfig": ("_attn_implementation",),
    "transformers:PreTrainedModel": (
        *("_from_config", "_hf_peft_config_loaded", "_is_stateful", "_keys_to_ignore_on_save", "_no_split_modules"),
    ),
    "transformers:Trainer": ("_globalstep_last_logged",),
    "accelerate.optimizer:AcceleratedOptimizer": ("_is_overflow",),
    "accelerate.state:GradientState": ("_set_sync_gradients",),
    "torch": ("_subclasses",),
    "torch._ops:OpOverload": ("_schema",),
    "torch.cuda.memory": ("_dump_snapshot", "_record_memory_history"),
    "torch.distributed:ProcessGroupGloo": ("_Options",),
    "torch.distributed:ProcessGroupGloo._Options": ("_devices", "_timeout"),
    "torch.distributed.distributed_c10d": ("_set_pg_timeout",),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": ("_fsdp_param_groups",),
    "torch.nn:Module": ("_forward_hooks", "_forward_pre_hooks", "_modules", "_parameters"),
    "torch.ops:aten": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "torch.ops:mkldnn": ("_linear_pointwise", "_reorder_linear_weight"),
    "torch.optim.lr_scheduler:LRScheduler": ("_last_lr",),
    "torch.optim.lr_scheduler:SequentialLR": ("_schedulers",),
    "torch.utils": ("_python_dispatch",),
    "torch:Tensor": ("_base",),
    "torch:UntypedStorage": ("_cdata",),
    "vllm.distributed.weight_transfer.factory": ("_registry",),
    "vllm.lora.worker_manager": ("_apply_adapters",),
    "vllm.model_executor.model_loader.reload.layerwise": (
        *("_do_torchao_reload", "_original_do_torchao_reload", "_place_kernel_tensors"),
    ),
}
# Parameters of each HuggingFace method that a trainer of ours overrides or calls through super(). If this fails after
# an upgrade of transformers, read the method's new body before changing a line here.
HOOKS = {
    "_build_accelerator_args": ["kwargs"],
    "_clip_grad_norm": ["model"],
    "_determine_best_metric": ["metrics", "trial"],
    "_finish_current_push": [],
    "_init_training_state": [
        *("max_steps", "num_update_steps_per_epoch", "num_train_epochs", "resume_from_checkpoint", "trial")
    ],
    "_issue_warnings_after_load": ["load_result"],
    "_load_best_model": [],
    "set_initial_training_values": ["args", "dataloader"],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_get_grad_norm": ["model", "grad_norm"],
    "_get_output_dir": ["trial"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "_load_rng_state": ["checkpoint"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_prepare_inputs": ["inputs"],
    "_push_from_checkpoint": ["checkpoint_folder"],
    "_save": ["output_dir", "state_dict"],
    "_save_checkpoint": ["model", "trial"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_track_num_input_tokens": ["inputs"],
    "create_optimizer": ["model"],
    "create_scheduler": ["num_training_steps", "optimizer"],
    "compute_loss": ["model", "inputs", "return_outputs", "num_items_in_batch"],
    "end": [],
    "evaluate": ["eval_dataset", "ignore_keys", "metric_key_prefix"],
    "evaluation_loop": ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"],
    "floating_point_ops": ["inputs"],
    "get_batch_samples": ["epoch_iterator", "num_batches", "device"],
    "get_eval_dataloader": ["eval_dataset"],
    "get_test_dataloader": ["test_dataset"],
    "get_optimizer_cls_and_kwargs": ["args", "model"],
    "get_total_train_batch_size": ["args"],
    "get_train_dataloader": [],
    "log": ["logs", "start_time"],
    "predict": ["test_dataset", "ignore_keys", "metric_key_prefix"],
    "save_model": ["output_dir", "_internal_call"],
    "training_step": ["model", "inputs", "num_items_in_batch"],
}
# Their arguments are passed on or ignored as they are.
VARIADIC = {
    "__init__",
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_run_epoch",
    "create_model_card",
    "train",
}
# Replaced as a whole; HuggingFace's arguments differ between the versions that are supported.
REPLACED = {"init_hf_repo", "push_to_hub"}

# Public in spite of the underscore: what a named tuple has.
PUBLIC = frozenset({"_asdict", "_fields", "_replace"})
# Private names of prefrl that another of its files uses.
SHARED = frozenset({"_by_name", "_train"})
# What only some installations have, and prefrl does without.
ABSENT = {("httpx", ""), ("torch.distributed", "ProcessGroupNCCL")}
# Where vLLM defines its routes, flags and environment variables, in the folder of its package.
_SPEAKING = ("envs.py", "config/**/*.py", "engine/**/*.py", "entrypoints/**/*.py")

Users = dict[tuple[str, str], set[str]]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


@cache
def nodes_of_files() -> dict[Path, list[ast.AST]]:
    """The nodes of each file of prefrl."""
    return {path: [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))] for path in SOURCES}


@cache
def _defined_names() -> dict[Path, set[str]]:
    """What each file of prefrl defines."""
    return {path: {*chain.from_iterable(map(_defined, nodes))} for path, nodes in nodes_of_files().items()}


@cache
def used_private_names() -> dict[str, set[str]]:
    """The private names that prefrl uses and does not define, each with the files that use it.

    An attribute of anything but `self` counts as defined only by the same file: private names are used where they are
    defined, and other libraries have names such as `_parameters`, too.
    """
    defined = _defined_names()
    everywhere = set().union(*defined.values())
    users = defaultdict(set)
    for path, nodes in nodes_of_files().items():
        for name, is_own in chain.from_iterable(map(_used, nodes)):
            if is_private(name) and name not in (everywhere if is_own else defined[path]):
                users[name].add(path.relative_to(ROOT).as_posix())
    return users


def overridden_private_names() -> set[str]:
    """The private names of other libraries' classes that classes of prefrl derived from them define anew."""
    overridden = set()
    for path, nodes in nodes_of_files().items():
        derived = [node for node in nodes if isinstance(node, ast.ClassDef) and node.bases]
        own = {node.name: {*filter(is_private, chain.from_iterable(map(_defined, node.body)))} for node in derived}
        if not any(own.values()) or path.name == "plugin.py":  # which imports vLLM
            continue
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name in own.keys() & vars(module).keys():
            others = (base for base in vars(module)[name].__mro__ if base.__module__.partition(".")[0] != "prefrl")
            overridden |= own[name] & set().union(*map(vars, others))
    return overridden


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()) if owner in ("self", "cls"):
            yield name
        case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[_, ast.Constant(value=str(name)), _]):
            yield name


def _used(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names, and whether they are of `self` or of a class's own `cls`."""
    match node:
        case ast.Attribute(value=owner, attr=name):
            yield name, _is_own(owner)
        case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            yield name, _is_own(owner)
        case ast.ImportFrom() | ast.Import():
            for module, name in _imports(node):
                yield from ((part, False) for part in (*module.split("."), name))


def _is_own(owner: ast.expr) -> bool:
    of_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
    return of_super or (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of what is imported from other libraries. The name of a whole module is empty."""
    match node:
        case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] != "prefrl":
            yield from ((module, alias.name) for alias in names)
        case ast.Import(names=names):
            yield from ((alias.name, "") for alias in names if alias.name.partition(".")[0] != "prefrl")


@cache
def imported_names() -> Users:
    """What prefrl imports from libraries that are not Python's own, with the files that import it."""
    users: Users = defaultdict(set)
    for path, nodes in nodes_of_files().items():
        for module, name in chain.from_iterable(map(_imports, nodes)):
            if module.partition(".")[0] not in sys.stdlib_module_names:
                users[module, name].add(path.relative_to(ROOT).as_posix())
    return users


def is_there(owner: str, name: str) -> bool:
    """Whether a module or class that can be imported here has `name`, or its instances are given it by its methods."""
    try:
        found = resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    if not name or hasattr(found, name):
        return True
    if inspect.ismodule(found):
        return hasattr(found, "__path__") and find_spec(f"{owner}.{name}") is not None
    sources = (dedent(inspect.getsource(cls)) for cls in found.__mro__ if cls.__module__ != "builtins")
    return any(name in _bound(source) for source in sources)


def _bound(source: str) -> set[str]:
    """What a source defines, imports or sets: in modules, in classes and in objects."""
    nodes = [*ast.walk(ast.parse(source))]
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    aliases = (
        alias.asname or alias.name
        for node in nodes
        for alias in getattr(node, "names", [])
        if isinstance(alias, ast.alias)
    )
    return stored | {*chain.from_iterable(map(_defined, nodes))} | {*aliases}


def is_in_sources(packages: Path, module: str, name: str) -> bool:
    """Whether the source of a module in the folder `packages`, which is not imported, binds `name`."""
    path = packages.joinpath(*module.split("."))
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
    return any(name in _bound(file.read_text(encoding="utf-8")) for file in files)


def told_to_vllm() -> set[str]:
    """The routes, flags and environment variables by which prefrl talks to vLLM, as they are in vLLM's sources."""
    flags = {word.removeprefix("--").removeprefix("no-") for word in (*CONTRACT, *CPU_FLAGS) if word.startswith("--")}
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    asking = [text for path, text in texts.items() if "prefrl/generation/" in path.as_posix()]
    routes = {route for text in asking for route in re.findall(r'"(?:\{server\.url\})?(/[a-z][a-z0-9_/]+)[?"]', text)}
    variables = {name for text in texts.values() for name in re.findall(r"\bVLLM_[A-Z_]+\b", text)}
    return (routes - {INFO_PATH}) | variables | {flag.replace("-", "_") for flag in (*flags, *REFUSED)}


def gone_from_vllm(packages: Path) -> list[str]:
    """What prefrl needs of vLLM and the sources in the folder `packages` lack, with the files that need it."""
    needed = {key: files for key, files in imported_names().items() if key[0].startswith("vllm.")}
    private = [(owner, name) for owner, names in PRIVATE.items() if owner.startswith("vllm.") for name in names]
    needed |= {key: used_private_names()[key[1]] for key in private}
    gone = [key for key in sorted(needed) if not is_in_sources(packages, *key)]
    files = chain.from_iterable((packages / "vllm").glob(pattern) for pattern in _SPEAKING)
    words = {word for file in files for word in re.split(r"[^\w/]+", file.read_text(encoding="utf-8"))}
    untold = sorted(told_to_vllm() - words)
    return [f"{'.'.join(key)}, which {', '.join(sorted(needed[key]))} uses" for key in gone] + untold


if __name__ == "__main__":
    missing = gone_from_vllm(Path(sys.argv[1]))
    print("\n".join(missing) or "vLLM has all that prefrl uses")
    sys.exit(bool(missing))
