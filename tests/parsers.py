"""A parser for the options of `prefrl <algorithm>`, made from the classes themselves."""

from __future__ import annotations

import dataclasses

from prefrl.registry import Algorithm
from prefrl.scripts.arguments.launch import LaunchArguments, ProcessArguments
from prefrl.scripts.parsing.argument_parser import ArgumentParser
from prefrl.scripts.schema import early_class


def parser_of(algorithm: Algorithm) -> ArgumentParser:
    """The parser of an algorithm."""
    config_class = algorithm.load_config()
    names = {field.name for field in dataclasses.fields(config_class)}
    script_class = early_class(algorithm.name).script
    launch_class = LaunchArguments if "use_vllm" in names else ProcessArguments
    return ArgumentParser((script_class, config_class, launch_class))
