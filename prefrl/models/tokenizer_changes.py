"""What a run changes in its tokenizer: the chat template, and the tokens that end and pad texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AddedToken, AutoTokenizer

from prefrl.distributed import shape_of
from prefrl.errors import ConfigError, cause_of
from prefrl.models.adapters import is_peft_model
from prefrl.models.modes import hub_or_cache, seeded
from prefrl.options.names import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written.

    Args:
        template: The Jinja template.
        tokens: Special tokens that it writes, besides those that begin and end a text.
        eos_token: The one of them that ends a turn of the assistant; None: the tokenizer's own end of a text does.
    """

    template: str
    tokens: tuple[str, ...] = ()
    eos_token: str | None = None


# Formats without a system role put its text in front of the first user's.
_SYSTEM_FIRST = (
    "{% set text = namespace(system='') %}{% for m in messages %}"
    "{% if m.role in ('system', 'developer') %}{% set text.system = m.content + '\n\n' %}{% else %}"
)
_USER = "{% set user = text.system + m.content %}{% set text.system = '' %}"

CHAT_FORMATS: dict[str, ChatFormat] = {
    "chatml": ChatFormat(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        tokens=("<|im_start|>", "<|im_end|>"),
        eos_token="<|im_end|>",
    ),
    "llama-3": ChatFormat(
        "{{ bos_token or '' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos_token="<|eot_id|>",
    ),
    "gemma": ChatFormat(
        "{{ bos_token or '' }}" + _SYSTEM_FIRST + "{% if m.role == 'assistant' %}<start_of_turn>model\n"
        "{{ m.content | trim }}{% else %}" + _USER + "<start_of_turn>user\n{{ user | trim }}{% endif %}"
        "<end_of_turn>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        tokens=("<start_of_turn>", "<end_of_turn>"),
        eos_token="<end_of_turn>",
    ),
    "mistral": ChatFormat(
        "{{ bos_token or '' }}"
        + _SYSTEM_FIRST
        + "{% if m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}"
        "{% else %}" + _USER + "[INST] {{ user | trim }} [/INST]{% endif %}{% endif %}{% endfor %}"
    ),
    "zephyr": ChatFormat(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}


_MULTIPLE = 64  # of which the number of embeddings is one, as matrix products on GPUs like it


@dataclass(frozen=True)
class TokenizerChanges:
    """What to change in a tokenizer; None: nothing.

    Args:
        chat_template_path: A file with a Jinja template; a name of `CHAT_FORMATS`; or a model, by name or folder,
            whose template to take. With a name or a model, the token that ends texts becomes that of the format.
        eos_token: A token of the vocabulary that ends texts.
        pad_token: A token of the vocabulary for padding.
        adds_tokens: Tokens that the format needs and the vocabulary lacks are added, and the model's embeddings
            grow; otherwise they are an error.
        seed: For new embeddings.
        name_or_path: Name or folder of another tokenizer to load instead of the model's.
    """

    chat_template_path: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    adds_tokens: bool = False
    seed: int | None = None
    name_or_path: str | None = None

    def apply(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        """Change the tokenizer in place, and the model where it needs embeddings of new tokens.

        Raises:
            ConfigError: A token is not in the vocabulary, or there is no such template.
        """
        if self.chat_template_path is not None:
            chat = _format(self.chat_template_path)
            missing = [token for token in chat.tokens if token not in tokenizer.get_vocab()]
            if missing:
                self._add(missing, tokenizer, model)
            tokenizer.chat_template = chat.template
            tokenizer.eos_token = chat.eos_token or tokenizer.eos_token
        for name in ("eos_token", "pad_token"):
            token = getattr(self, name)
            if token is not None:
                if token not in (known := tokenizer.get_vocab()):
                    remedy = nearest(token, known, otherwise="Name one that is, or add it to model and tokenizer.")
                    raise ConfigError(f"{name}={token!r}: is not in the tokenizer's vocabulary. {remedy}")
                setattr(tokenizer, name, token)

    def _add(self, tokens: list[str], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        lacks = f"chat_template_path={self.chat_template_path!r}: the vocabulary lacks {', '.join(map(repr, tokens))}"
        if not self.adds_tokens:
            raise ConfigError(
                f"{lacks}, and only sft and reward add tokens. Train with sft and this option first: what it saves "
                "has the template and the tokens. 'mistral' and 'zephyr' need none."
            )
        if is_peft_model(model):
            raise ConfigError(
                f"{lacks}, and an adapter would leave their embeddings untrained. Train the embeddings first, without "
                "an adapter and with freeze=['layers']: what that run saves has the tokens, so an adapter can follow. "
                "Or choose 'mistral' or 'zephyr', which need no tokens."
            )
        tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens], special_tokens=True)
        if len(tokenizer) > int(shape_of(model.get_input_embeddings().weight)[0]):
            with seeded(self.seed):  # near the mean of the others; an outline has no values to take a mean of
                is_outline = model.device.type == "meta"
                model.resize_token_embeddings(
                    len(tokenizer), pad_to_multiple_of=_MULTIPLE, mean_resizing=not is_outline
                )


def check_special_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> None:
    """Refuse tokens that pad, begin or end a text and have no embedding.

    Args:
        tokenizer: The tokenizer.
        count: Tokens that the model has embeddings for.

    Raises:
        ConfigError: One has none.
    """
    for name in ("pad_token", "bos_token", "eos_token"):
        token_id = getattr(tokenizer, f"{name}_id")
        if token_id is not None and token_id >= count:
            raise ConfigError(
                f"{name}={getattr(tokenizer, name)!r} has the id {token_id}, but the model has embeddings for only "
                f"{count} tokens. Use the model's own tokenizer, set tokenizer.{name} to a token that has an "
                "embedding, or call model.resize_token_embeddings(len(tokenizer))."
            )


def _format(path: str) -> ChatFormat:
    if Path(path).is_file():
        return ChatFormat(Path(path).read_text(encoding="utf-8"))
    if path in CHAT_FORMATS and not Path(path).is_dir():
        return CHAT_FORMATS[path]
    try:
        with hub_or_cache(path):
            source = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template_path={path!r}: is neither a file with a Jinja template, nor one of "
            f"{', '.join(CHAT_FORMATS)}, nor a model: {error}"
        ) from cause_of(error)
    if source.chat_template is None:
        raise ConfigError(f"chat_template_path={path!r}: the tokenizer of this model has no chat template")
    template = str(source.get_chat_template())
    added = [token.content for token in source.added_tokens_decoder.values()]
    tokens = [token for token in added if token in template or token == source.eos_token]
    return ChatFormat(template, tuple(tokens), source.eos_token)
