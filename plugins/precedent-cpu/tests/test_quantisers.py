"""Codes packed by the quantisers' own packages mean what these packages dequantise them to: make test-gguf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.packed_checkpoints import COMPRESSED, GPTQ, GROUP, Formats, Packed, write_packed
from torch import Tensor, nn

from precedent.target.load.loading import load_target
from precedent_cpu.quantised_linear import QuantisedLinear

pytestmark = [
    pytest.mark.gguf,
    pytest.mark.filterwarnings("ignore"),  # theirs
]


def random_weight(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 10


def compressed(shape: torch.Size, seed: int, *, bits: int = 4, symmetric: bool = True, group: int = GROUP) -> Packed:
    pytest.importorskip("compressed_tensors", reason="make test-gguf installs it")
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=bits, symmetric=symmetric, **how))
    weight = random_weight(shape, seed)
    groups = weight.view(shape[0], -1, group or shape[1])
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    packed = PackedQuantizationCompressor.compress(tensors, scheme)
    return Packed(packed, PackedQuantizationCompressor.decompress(packed, scheme)["weight"])


def torchao(shape: torch.Size, seed: int, *, bits: int = 8, group: int = 0) -> Packed:
    pytest.importorskip("torchao", reason="make test-gguf installs it")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    linear = linear_of(random_weight(shape, seed))
    how = IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(group)) if group else Int8WeightOnlyConfig()
    quantize_(linear, how)
    tensors, metadata = flatten_tensor_state_dict({"0.weight": linear.weight})
    weight: Any = linear.weight
    parts = {name.removeprefix("0."): tensor for name, tensor in tensors.items()}
    return Packed(parts, weight.dequantize(), metadata["0.weight"])


def gptqmodel(shape: torch.Size, seed: int, *, bits: int = 4, act_order: bool = False, awq: bool = False) -> Packed:
    pytest.importorskip("gptqmodel", reason="make test-gguf installs it")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    (outputs, inputs), weight, group_of = shape, random_weight(shape, seed), torch.arange(shape[1]) // GROUP
    if act_order:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    sizes = {"bits": bits, "group_size": GROUP, "in_features": inputs, "out_features": outputs}
    module: Any = (AwqTorchLinear if awq else TorchLinear)(sym=False, desc_act=act_order, bias=False, **sizes)
    groups = [weight[:, group_of == number] for number in range(inputs // GROUP)]
    lowest, highest = (torch.stack(each, 1) for each in zip(*((g.amin(1), g.amax(1)) for g in groups), strict=True))
    scales = ((highest - lowest) / ((1 << bits) - 1)).half().float()
    zeros = (-lowest / scales).round()
    linear = linear_of(weight)
    if awq:
        module.pack(linear, scales.half(), zeros)
        found = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), bits, GROUP).T
    else:
        module.pack_original(linear, scales, zeros, group_of.int())
        module.scales = module.scales.float()
        found = module.eval().dequantize_weight().T
    return Packed(dict(module.half().state_dict()), found)


def linear_of(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    return linear


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
TORCHAO = {"quant_method": "torchao", "quant_type": "int8"}
GPTQ_V2 = {**GPTQ, "checkpoint_format": "gptq_v2"}

PACKED: Formats = {
    "compressed-tensors int4": (COMPRESSED, compressed),
    "compressed-tensors int8": (COMPRESSED, lambda shape, seed: compressed(shape, seed, bits=8)),
    "compressed-tensors rows": (COMPRESSED, lambda shape, seed: compressed(shape, seed, bits=8, group=0)),
    "compressed-tensors zeros": (COMPRESSED, lambda shape, seed: compressed(shape, seed, symmetric=False)),
    "torchao int8": (TORCHAO, torchao),
    "torchao int8 groups": (TORCHAO, lambda shape, seed: torchao(shape, seed, group=GROUP)),
    "torchao int4 groups": (TORCHAO, lambda shape, seed: torchao(shape, seed, bits=4, group=GROUP)),
    "gptqmodel": (GPTQ_V2, gptqmodel),
    "gptqmodel 8": ({**GPTQ_V2, "bits": 8}, lambda shape, seed: gptqmodel(shape, seed, bits=8)),
    "gptqmodel act-order": ({**GPTQ_V2, "desc_act": True}, lambda shape, seed: gptqmodel(shape, seed, act_order=True)),
    "gptqmodel awq": (AWQ, lambda shape, seed: gptqmodel(shape, seed, awq=True)),
}


@pytest.mark.parametrize("name", PACKED)
def test_codes_mean_what_their_package_dequantises_them_to(name: str, tmp_path: Path) -> None:
    expected = write_packed(tmp_path, name, PACKED)
    model, _ = load_target(tmp_path, device="cpu")
    layers = [(path, module) for path, module in model.named_modules() if path.endswith("_proj")]
    assert layers
    for path, module in layers:
        assert isinstance(module, QuantisedLinear), path
        found = torch.from_numpy(module.quantised.dequantised(slice(None)))
        torch.testing.assert_close(found, expected.get_parameter(f"{path}.weight"), rtol=0, atol=1e-6)
