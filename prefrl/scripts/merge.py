"""`prefrl merge`: an adapter and its base model as one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from prefrl.errors import ConfigError
from prefrl.options.fields import check_fields, opt
from prefrl.scripts.arguments.command import DType
from prefrl.scripts.declaration import command

__all__ = ["MergeArguments", "main"]


@dataclass
class MergeArguments:
    """What to merge, and where to."""

    adapter: str | None = opt(None, "Folder of the adapter, or its name on the Hub.")
    output_dir: str | None = opt(None, "Folder for the merged model.")
    dtype: DType = opt("auto", "Type of the saved weights; auto: that of the base model. Merging is done in float32.")

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("adapter", "output_dir"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: not given. Write prefrl merge ADAPTER OUTPUT_DIR.")
        if any(Path(str(self.output_dir)).glob("*.safetensors")):
            raise ConfigError(f"output_dir={self.output_dir!r}: already holds a model. Choose another folder.")


@command("merge", MergeArguments, about="Merge an adapter into its base model.", positional=("adapter", "output_dir"))
def main(options: MergeArguments) -> int:
    """Merge and save."""
    from prefrl.models.export import is_adapter, load_merged, tokenizer_of_checkpoint

    assert options.adapter is not None  # it is checked
    assert options.output_dir is not None
    if not is_adapter(options.adapter):
        raise ConfigError(
            f"adapter={options.adapter!r}: holds no adapter_config.json. A model that was trained in full needs no "
            "merge."
        )
    model = load_merged(options.adapter, dtype=options.dtype)
    tokenizer = tokenizer_of_checkpoint(options.adapter, model)
    model.save_pretrained(options.output_dir)
    tokenizer.save_pretrained(options.output_dir)
    print(f"The merged model is in {options.output_dir}. To try it: prefrl chat {options.output_dir}")
    return 0
