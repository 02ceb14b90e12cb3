"""Patches models in the way of liger-kernel 0.8, with plain torch in the place of Triton, which a CPU cannot run."""

__version__ = "0.8.5"
