"""Secrets among the options are in nothing that a run shows or writes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from datasets import Dataset

from prefrl import ConfigError, GRPOConfig, SFTConfig, SFTTrainer
from prefrl.models.load import load_model
from tests.assets import tiny_model, tiny_tokenizer

SECRET = "open-sesame"
LOGIN = f"http://user:{SECRET}@proxy:1"


@dataclass
class OwnConfig(SFTConfig):
    """A user's subclass."""

    url: str = ""


@pytest.mark.parametrize("config_class", [SFTConfig, GRPOConfig, OwnConfig])
def test_no_form_of_a_config_shows_secrets(config_class: type[SFTConfig], tmp_path: Path) -> None:
    extra = {"url": LOGIN} if config_class is OwnConfig else {}
    config = config_class(
        output_dir=str(tmp_path),
        hub_token=SECRET,
        model_init_kwargs={"token": SECRET, "proxies": {"http": LOGIN}},
        run_name="shown",
        use_cpu=True,
        **extra,
    )
    forms = [repr(config), str(config), config.to_json_string(), str(config.to_sanitized_dict())]
    for form in forms:
        assert SECRET not in form
        assert "shown" in form
    assert config.hub_token == SECRET
    assert config.model_init_kwargs is not None
    assert config.model_init_kwargs["token"] == SECRET


def test_nothing_that_a_run_writes_or_prints_has_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    policy = tiny_model()
    policy.save_pretrained(tmp_path / "policy")
    config = SFTConfig(
        output_dir=str(tmp_path / "out"),
        hub_token=SECRET,
        model_init_kwargs={"token": SECRET},
        max_steps=1,
        logging_steps=1,
        save_steps=1,
        use_cpu=True,
        report_to="none",
    )
    rows = Dataset.from_list([{"text": "a b c"}] * 8)
    trainer = SFTTrainer(str(tmp_path / "policy"), config, train_dataset=rows, processing_class=tiny_tokenizer())
    trainer.train()
    trainer.save_model()
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {"README.md", "trainer_state.json"} <= {path.name for path in written}
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []
    printed = capfd.readouterr()
    assert "loss" in printed.out
    assert SECRET not in printed.out + printed.err


def test_an_error_that_quotes_the_options_has_no_secrets() -> None:
    with pytest.raises(ConfigError, match=r"model_init_kwargs=.* has no effect") as error:
        load_model(tiny_model(), model_init_kwargs={"token": SECRET})
    assert SECRET not in str(error.value)
    with pytest.raises(ConfigError, match="vllm_server_base_url") as error:
        GRPOConfig(use_cpu=True, use_vllm=True, vllm_server_base_url=[f"ftp://user:{SECRET}@host"])
    assert SECRET not in str(error.value)
