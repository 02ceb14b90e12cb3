"""Sandboxes for code that a model wrote."""

from prefrl.sandbox.local import Isolation, LocalSandbox
from prefrl.sandbox.protocol import (
    LANGUAGES,
    AssertionTest,
    InputOutputTest,
    RemoteSandbox,
    Sandbox,
    SandboxError,
    SandboxLimits,
    Verdict,
)

__all__ = [
    "LANGUAGES",
    "AssertionTest",
    "InputOutputTest",
    "Isolation",
    "LocalSandbox",
    "RemoteSandbox",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "Verdict",
]
