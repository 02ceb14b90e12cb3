from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from prefrl.generation.local import packed_linear as linear_module
from prefrl.generation.local.packed_linear import packed_linears

LARGE = (512, 1024)  # [in, out]: the smallest that is packed


def layer(sizes: tuple[int, int] = LARGE, *, bias: bool = True, **options: torch.dtype) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(*sizes, bias=bias, **options)


def is_packed(module: nn.Module) -> bool:
    return "forward" in vars(module)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (8, 1), (33, 1), (3, 70)])
def test_a_packed_layer_computes_the_same(shape: tuple[int, int], bias: bool) -> None:
    module = layer(bias=bias)
    rows = torch.randn(*shape, 512, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), packed_linears(module):
        assert is_packed(module)
        output = module(rows)
    # Of numbers below 4 in size, summed in another order.
    torch.testing.assert_close(output, module(rows), atol=4e-6, rtol=0)


def test_weights_of_now_are_packed_each_time() -> None:
    module, rows = layer(bias=False), torch.randn(2, 512)
    for factor in (1.0, 3.0):
        module.weight.data *= factor
        with torch.inference_mode(), packed_linears(module):
            torch.testing.assert_close(module(rows), linear(rows, module.weight), atol=1e-5, rtol=0)


def test_layers_are_their_own_again_after_an_error_too() -> None:
    module = layer()
    with packed_linears(module):
        assert is_packed(module)
    assert not is_packed(module)
    with pytest.raises(KeyError), packed_linears(module):
        raise KeyError
    assert not is_packed(module)
    module(torch.randn(2, 512)).sum().backward()
    assert module.weight.grad is not None


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_only_large_plain_fp32_layers_are_packed() -> None:
    hooked = layer()
    hooked.forward = lambda input: torch.zeros(())  # type: ignore[method-assign, assignment]  # as backends do
    others = nn.ModuleList([layer((512, 1023)), layer(dtype=torch.bfloat16), Scaled(*LARGE), hooked])
    forward = hooked.forward
    model = nn.ModuleList([layer(), others])
    with packed_linears(model):
        assert is_packed(model[0])
        assert [is_packed(module) for module in others] == [False, False, False, True]
        assert hooked.forward is forward
    assert hooked.forward is forward


def test_the_last_layers_are_packed_as_far_as_memory_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_MEMORY", 2 * 4 * math.prod(LARGE))
    model = nn.Sequential(*(layer() for _ in range(3)))
    with packed_linears(model):
        assert [is_packed(module) for module in model] == [False, True, True]


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")  # torch's own, on switching back
def test_nothing_is_packed_where_onednn_is_switched_off() -> None:
    module = layer()
    with torch.backends.mkldnn.flags(enabled=False), packed_linears(module):
        assert not is_packed(module)


def test_autocast_decides_the_dtype_as_ever() -> None:
    module, rows = layer(), torch.randn(2, 512)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        expected = module(rows)
        with packed_linears(module):
            output = module(rows)
    assert output.dtype == torch.bfloat16
    assert output.equal(expected)


def test_rows_of_another_dtype_are_refused_as_ever() -> None:
    with packed_linears(module := layer()), pytest.raises(RuntimeError, match="same dtype"):
        module(torch.randn(2, 512, dtype=torch.float64))


def test_hooks_of_a_packed_layer_run() -> None:
    module = layer()
    module.register_forward_hook(lambda module, args, output: output + 1)
    with torch.inference_mode(), packed_linears(module):
        assert is_packed(module)
        assert module(torch.zeros(1, 512)).equal(module.bias[None] + 1)
