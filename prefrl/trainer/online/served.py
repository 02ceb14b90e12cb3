"""A teacher that is not in the trainer's memory, but on vLLM servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets

from prefrl.data.packing import list_lengths
from prefrl.errors import ConfigError, DataError
from prefrl.generation.vllm.teacher import TeacherServers, teacher_key
from prefrl.http import Http
from prefrl.options.rollout import are_local
from prefrl.trainer.arguments import ids_of_prompts

if TYPE_CHECKING:
    from prefrl.trainer.base_trainer import BaseTrainer


def served_teacher(trainer: BaseTrainer[Any]) -> TeacherServers:
    """The servers of the teacher, which answer and were compared with the student. All ranks must call it.

    Raises:
        ConfigError: Their tokenizer splits prompts in another way than the student's, or the student reads images.
        DataError: A prompt is too long for them, with what is sampled after it.
        GenerationError: They do not answer, or not as they should.
    """
    if trainer.images is not None:
        raise ConfigError(
            f"teacher_server_base_url with a {type(trainer.processing_class).__name__}, which reads images: only "
            "texts are sent to a teacher's servers. Pass its tokenizer as processing_class, or give a teacher_model."
        )
    args: Any = trainer.args
    urls, params = args.teacher_urls, args.teacher_server_params
    vocab_size = trainer.policy.config.get_text_config().vocab_size
    http = Http(key=teacher_key(params, are_local=are_local(urls)))
    servers = TeacherServers(urls, params, vocab_size=vocab_size, http=http)
    servers.recover()
    servers.check_tokenizer(ids_of_prompts(trainer))
    if isinstance(trainer.train_dataset, datasets.Dataset):
        lengths, sampled = list_lengths(trainer.train_dataset, "prompt_ids"), args.length_bound.sampled
        row = int(lengths.argmax())
        if lengths[row] + sampled > servers.longest_text:
            raise DataError(
                f"row {row} of the dataset has {lengths[row]} tokens in the prompt, and {sampled} are sampled, but "
                f"the teacher's servers take texts of {servers.longest_text} tokens. Start them with a larger "
                "--max-model-len, or lower max_prompt_length or max_completion_length."
            )
    return servers
