"""The interface of a loss of NeMo-RL, of which PyPI has only a placeholder: what its `LossFunction` says.

https://github.com/NVIDIA-NeMo/RL, nemo_rl/algorithms/loss/interfaces.py, as of August 2026.
"""

import enum


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"
