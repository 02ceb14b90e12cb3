"""Features that an option switches on, and the options that have an effect only then."""

from __future__ import annotations

__all__ = ["SWITCHES"]

SWITCHES: dict[str, tuple[str, ...]] = {
    "use_vllm": (
        *("vllm", "vllm_python", "vllm_args"),
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_kwargs"),
        *("vllm_guided_decoding_regex", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
        *("vllm_importance_sampling_kwargs", "weight_sync", "generation_mode", "max_staleness"),
    ),
    "vllm": ("vllm_python", "vllm_args"),
    "use_peft": (
        *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_parameters"),
        *("lora_modules_to_save", "lora_task_type", "lora_rank_pattern", "lora_alpha_pattern", "lora_init"),
        *("use_rslora", "use_dora", "load_in_4bit", "load_in_8bit"),
    ),
    "load_in_4bit": ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    "log_completions": ("num_completions_to_print", "log_unique_prompts"),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
    "precompute_ref_log_probs": ("precompute_ref_batch_size",),
    "activation_checkpointing": ("activation_checkpointing_kwargs",),
    "use_liger_kernel": ("liger_kernel_config",),
}
