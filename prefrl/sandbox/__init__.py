"""Sandboxes for code that a model wrote."""

from prefrl.sandbox.local import Isolation, LocalSandbox
from prefrl.sandbox.protocol import (
    LANGUAGES,
    AssertionTest,
    InputOutputTest,
    Sandbox,
    SandboxError,
    SandboxLimits,
    Verdict,
)
from prefrl.sandbox.remote import RemoteSandbox

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
