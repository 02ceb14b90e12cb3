"""Every error that prefrl raises on purpose. Users can catch `PrefrlError`."""

from prefrl.printable import printable, without_secrets

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EpisodeError",
    "GenerationError",
    "HubError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PrefrlError",
    "RewardError",
    "WeightSyncError",
]


class PrefrlError(Exception):
    """Base class of all errors that prefrl raises on purpose.

    Messages quote options, data and servers, so secrets in them are masked and control characters are escaped.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(without_secrets(message)))


class ConfigError(PrefrlError, ValueError):
    """An option, or a combination of options, cannot work."""


class DataError(PrefrlError, ValueError):
    """A dataset, a row of it or a chat template cannot be used."""


class RewardError(PrefrlError, RuntimeError):
    """A reward function failed, timed out or returned something that is not a reward."""


class GenerationError(PrefrlError, RuntimeError):
    """No completions could be generated."""


class EpisodeError(PrefrlError, RuntimeError):
    """A tool or an environment failed, or returned something that cannot be shown to the model."""


class WeightSyncError(PrefrlError, RuntimeError):
    """The weights of the policy could not be sent to the generator."""


class NonFiniteError(PrefrlError, RuntimeError):
    """The loss, the gradients or the weights of a training are NaN or infinite."""


class CheckpointError(PrefrlError, RuntimeError):
    """A checkpoint or a model could not be written where it belongs, or may not be read."""


class HubError(PrefrlError, RuntimeError):
    """The model could not be pushed to the Hub."""


class OutOfMemoryError(PrefrlError, RuntimeError):
    """The device or the host has too little memory for a pass, for generation or for a checkpoint."""
