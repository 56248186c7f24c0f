"""Parts of a window on threads of our own: the reference's masks, torch's thread count, errors and modes."""

import pytest
import torch

from sparsekit_ao.kernels import threads
from sparsekit_ao.kernels.api import scope_mask
from sparsekit_ao.kernels.tiling import Blocks, Scopes


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def masks_of(weight, steps, impl):
    mask = torch.ones(weight.shape, dtype=torch.bool)
    for at, (block, scope, keep) in enumerate(steps):
        group = Scopes(members=(Blocks(shape=block, values=weight, mask=mask),), shape=scope)
        scope_mask([group], keep, stage=at > 0, impl=impl)
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "steps",
    [
        [((1, 1), (1, 8), 4)],
        [((1, 1), (1, 1024), 500)],
        [((1, 1), (1024, 1), 500)],
        [((1, 2), (1, 4), 2)],
        [((32, 1), (1, 8), 4), ((1, 1), (1, 8), 2)],
        [((1, 1), (1, 8), 4), ((1, 1), (1024, 1), 300)],
    ],
)
@pytest.mark.parametrize("ties", [False, True])
def test_several_parts_give_the_reference_masks(steps, dtype, ties):
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    weight = (weight * 2).round().to(dtype) if ties else weight.to(dtype)
    weight[3, 5], weight[7, 9] = float("nan"), float("-inf")
    with torch.inference_mode():
        found = masks_of(weight, steps, "cpu")
    assert torch.equal(found, masks_of(weight, steps, "reference"))


def test_torch_is_kept_to_one_thread_inside_and_to_its_own_number_after():
    seen = []
    threads.run_apart([lambda: seen.append(torch.get_num_threads())] * 5)
    assert seen == [1] * 5
    assert torch.get_num_threads() == 2


def test_the_first_error_is_raised_and_later_calls_work():
    def fail():
        raise ValueError("this part")

    with pytest.raises(ValueError, match="this part"):
        threads.run_apart([fail, lambda: None])
    done = []
    threads.run_apart([lambda: done.append(1)] * 3)
    assert done == [1, 1, 1]
