"""Keys of axolotl's YAML files that have another name here."""

from __future__ import annotations

from prefrl.options.foreign.row import Row, instead, not_needed, not_there, renamed

__all__ = ["AXOLOTL"]

AXOLOTL: dict[str, Row] = {
    "base_model": renamed("model_name_or_path"),
    "sequence_len": renamed("max_length"),
    "micro_batch_size": renamed("per_device_train_batch_size"),
    "num_epochs": renamed("num_train_epochs"),
    "optimizer": renamed("optim"),
    "lr_scheduler": renamed("lr_scheduler_type"),
    "sample_packing": renamed("packing"),
    "eval_sample_packing": renamed("eval_packing"),
    "pad_to_sequence_len": not_needed("batches are laid out without padding"),
    "flash_attention": instead("set attn_implementation='flash_attention_2'"),
    "sdp_attention": instead("set attn_implementation='sdpa'"),
    "train_on_inputs": instead("set completion_only_loss=False to train on prompts, too"),
    "val_set_size": renamed("test_split_size"),
    "rl": instead("choose the command: prefrl dpo, kto, orpo or grpo"),
    "rl_beta": renamed("beta"),
    "adapter": instead("use use_peft=True for LoRA; add load_in_4bit=True for QLoRA"),
    "lora_target_linear": instead("set lora_target_modules=all-linear"),
    "peft_use_rslora": renamed("use_rslora"),
    "peft_use_dora": renamed("use_dora"),
    "unfrozen_parameters": instead("use freeze, which names the parameters that are not trained"),
    "saves_per_epoch": instead("set save_strategy='epoch' and save_epochs"),
    "evals_per_epoch": instead("set eval_strategy='epoch' and eval_epochs"),
    "neftune_noise_alpha": not_there("noise on embeddings is not supported"),
    "wandb_project": instead("set the variable WANDB_PROJECT, for example in env"),
    "special_tokens": instead("set eos_token and pad_token"),
    "chat_template_jinja": instead("write it into a file and set chat_template_path"),
    "default_system_message": renamed("system_prompt"),
    "field_messages": instead("set columns={messages: ...}, for one dataset or for each of datasets"),
}
