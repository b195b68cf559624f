"""Products of a few rows on a CPU: right, and the same to the last bit at every width."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.sums_in_order import product_in_order
from torch import Tensor, nn

from precedent_cpu.kernel_code import LANES
from precedent_cpu.linear import PackedLinear, pack_linears
from precedent_cpu.product_kernels import LONG_ROW, PIECE, TOGETHER
from precedent_cpu.row_products import fits, row_product
from precedent_cpu.tile_products import DEPTH
from precedent_testing.tiny_models import tiny_causal_lm

pytestmark = pytest.mark.skipif(
    not fits(torch.zeros(1, LANES)), reason="torch runs on other threads here, or the processor lacks fused operations"
)

DTYPES = [torch.bfloat16, torch.float32]
WIDTHS = [*range(1, TOGETHER + 1), 17, 33]
LENGTHS = [4 * LANES, LONG_ROW + LANES, LONG_ROW + DEPTH]
NUM_OUTS = [1, 4, 13, PIECE, 3 * PIECE + 6]


def random_rows(count: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Normal numbers, `[count, length]`."""
    return torch.randn(count, length, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_outs", NUM_OUTS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.usefixtures("each_unit")
@pytest.mark.sampled(7)
def test_the_product_is_the_exact_one_rounded_once(
    dtype: torch.dtype, num_outs: int, with_bias: bool, length: int
) -> None:
    """Against float64: float32 sums, and at most one rounding to bfloat16 on top."""
    weight, rows = random_rows(num_outs, length, dtype, 1), random_rows(11, length, dtype, 2)
    bias = random_rows(1, num_outs, torch.float32, 3)[0] if with_bias else None
    expected = rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    found = row_product(rows, weight, bias)
    assert found.dtype == dtype
    step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=step, atol=1e-4 * (length / 64) ** 0.5)
    for few in (1, TOGETHER):
        assert torch.equal(row_product(rows[:few], weight, bias), found[:few])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_outs", "length"),
    [(3 * PIECE + 7, 3 * LANES), (PIECE + 5, LONG_ROW + LANES), (61, LONG_ROW), (2, LANES)],
    ids=["odd numbers of both", "long rows", "longest of the short", "smallest"],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_sums_keep_their_order(
    dtype: torch.dtype, num_outs: int, length: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of rows up to the largest step, on the vector unit: the bits of the sums written down plainly."""
    monkeypatch.setattr("precedent_cpu.row_products.tiles_at_hand", lambda: False)
    weight, rows = random_rows(num_outs, length, dtype, 9), random_rows(64, length, dtype, 10)
    bias = random_rows(1, num_outs, torch.float32, 11)[0] if with_bias else None
    expected = product_in_order(rows, weight, bias, LANES)
    for count in range(1, 65):
        assert torch.equal(row_product(rows[:count], weight, bias), expected[:count]), count


def test_the_order_is_seen_in_the_bits() -> None:
    """Of the same products in another order many differ: the test above can fail."""
    weight, rows = random_rows(64, 8 * LANES, torch.float32, 12), random_rows(3, 8 * LANES, torch.float32, 13)
    found = product_in_order(rows, weight, None, LANES)
    assert (found != product_in_order(rows, weight, None, LANES // 2)).any()
    assert (found != product_in_order(rows.flip(1), weight.flip(1), None, LANES)).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("each_unit")
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    """NaN and infinity come out where they belong, and nowhere else."""
    weight, rows = torch.ones(19, DEPTH, dtype=dtype), torch.ones(6, DEPTH, dtype=dtype)
    rows[1, 3], rows[4, 0] = float("nan"), float("-inf")
    found = row_product(rows, weight, None)
    assert found[1].isnan().all()
    assert (found[4] == float("-inf")).all()
    assert (found[[0, 2, 3, 5]] == DEPTH).all()


@pytest.mark.usefixtures("each_unit")
@pytest.mark.parametrize("copies", [1, 3])
def test_ties_are_rounded_to_even(copies: int) -> None:
    """As every conversion to bfloat16 does; the kernels write their outputs themselves."""
    rows = torch.zeros(1, DEPTH)
    sums = torch.tensor([1.0 + 1 / 256, 1.0 + 3 / 256, -1.0 - 1 / 256, 1.0 + 1 / 256 + 1e-6, 3.3e38, 1e-40] * copies)
    found = row_product(rows.bfloat16(), torch.zeros(6 * copies, DEPTH, dtype=torch.bfloat16), sums)
    assert torch.equal(found[0], sums.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_layer_of_any_shape_of_input(dtype: torch.dtype) -> None:
    """Leading dimensions, views, no rows at all, more rows than `row_product` takes, gradients."""
    plain = nn.Linear(2 * LANES, 12).to(dtype)
    packed = nn.Sequential(copy.deepcopy(plain))
    pack_linears(packed)
    inputs = random_rows(300, 4 * LANES, dtype, 6)[:, ::2]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    with torch.inference_mode():
        for piece in (inputs, inputs[:1], inputs[:0], inputs[:6].view(2, 3, -1), inputs[5], inputs[:70]):
            torch.testing.assert_close(packed(piece), plain(piece), **tolerance)
    packed(inputs).sum().backward()
    assert packed[0].weight.grad is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_was_cast_or_replaced_meanwhile(dtype: torch.dtype) -> None:
    """It looks at its weight in every call, instead of reading other bytes than are there."""
    plain = nn.Linear(2 * LANES, 12).to(dtype)
    model = nn.Sequential(copy.deepcopy(plain))
    pack_linears(model)
    rows = random_rows(5, 2 * LANES, torch.float64, 8)
    with torch.inference_mode():
        torch.testing.assert_close(model.double()(rows), plain.double()(rows))
    model[0].weight = nn.Parameter(torch.ones(2 * LANES, 12, dtype=torch.float64).T)
    with torch.inference_mode():
        torch.testing.assert_close(model(rows) - plain.bias, rows.sum(1, keepdim=True).expand(-1, 12))


def test_a_packed_model_notices_new_weights_and_keeps_its_state_dict() -> None:
    """Loading other weights into it is not answered with the old ones."""
    model, other = (tiny_causal_lm("llama", dtype=torch.float32, seed=seed) for seed in (1, 2))
    names, inputs = list(model.state_dict()), torch.arange(100).view(1, -1)
    with torch.inference_mode():
        assert pack_linears(model) > 0
        assert all(
            isinstance(each, PackedLinear) and each.few_rows for each in model.modules() if hasattr(each, "bias")
        )
        model(inputs)
    model.load_state_dict(other.state_dict())
    assert list(model.state_dict()) == names
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs).logits, other(inputs).logits, rtol=1e-3, atol=1e-3)


def test_without_memory_for_copies_all_rows_go_through_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model too large for packed copies is decoded as fast; only its prompts are slower."""
    monkeypatch.setattr("precedent_cpu.linear.MEMORY_SHARE", 0.0)
    model = nn.Sequential(nn.Linear(LANES, 8).to(torch.bfloat16))
    assert pack_linears(model) == 0
    layer = model[0]
    with torch.inference_mode():
        for count in (1, 200):
            rows = random_rows(count, LANES, torch.bfloat16, 7)
            expected = rows.float() @ layer.weight.float().T + layer.bias.float()
            torch.testing.assert_close(layer(rows).float(), expected, rtol=1e-2, atol=1e-2)
