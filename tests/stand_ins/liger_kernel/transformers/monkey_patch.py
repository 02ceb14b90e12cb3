from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any

import torch
from torch import nn

NUM_ROTATIONS = 0


class LigerRMSNorm(nn.Module):
    def forward(self, hidden: Any) -> Any:
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


class LigerSwiGLUMLP(nn.Module):
    def forward(self, x: Any) -> Any:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def liger_rotary_pos_emb(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    global NUM_ROTATIONS
    NUM_ROTATIONS += 1

    def rotate(x: Any) -> Any:
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return x * cos.unsqueeze(unsqueeze_dim) + turned * sin.unsqueeze(unsqueeze_dim)

    return rotate(q), rotate(k)


def _loss_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the model's forward was replaced by that of the fused loss")


def apply_liger_kernel_to_qwen2(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Any = None,
) -> None:
    assert not cross_entropy
    code: Any = sys.modules["transformers.models.qwen2.modeling_qwen2"]
    if rope:
        code.apply_rotary_pos_emb = liger_rotary_pos_emb
    if rms_norm:
        code.Qwen2RMSNorm = LigerRMSNorm
    if swiglu:
        code.Qwen2MLP = LigerSwiGLUMLP
    if fused_linear_cross_entropy:
        model.forward = MethodType(_loss_forward, model)
    base = getattr(model, model.base_model_prefix)
    norms = [base.norm]
    for layer in base.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        if swiglu:
            layer.mlp.__dict__["forward"] = MethodType(LigerSwiGLUMLP.forward, layer.mlp)
    for norm in norms if rms_norm else ():
        norm.__dict__["forward"] = MethodType(LigerRMSNorm.forward, norm)


def apply_liger_kernel_to_gemma3_text(geglu: bool = True, model: Any = None) -> None:
    raise TypeError("The model must be Gemma3ForCausalLM.")


def apply_liger_kernel_to_llama(swiglu: bool = True, model: Any = None) -> None:
    raise ImportError("cannot import name 'LlamaOutput'")


MODEL_TYPE_TO_APPLY_LIGER_FN = {
    "qwen2": apply_liger_kernel_to_qwen2,
    "gemma3_text": apply_liger_kernel_to_gemma3_text,
    "llama": apply_liger_kernel_to_llama,
}


def _apply_liger_kernel_to_instance(model: Any, **options: bool) -> None:
    function = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    names = inspect.signature(function).parameters
    function(model=model, **{name: value for name, value in options.items() if name in names})
