"""The block before removed blocks makes up for them: its last matrix is fitted to the dense model in closed form."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .. import masking
from ..calibration import Recorder, Recording, Target, damped_gram, damped_inverse, token_rows
from ..calibration.products import Place, Product
from ..errors import SparsityError
from ..models.loading import is_elsewhere
from ..models.names import named_tensors, owner_of, weights_by_name
from ..oneshot.chain import CalibrationData
from ..oneshot.solvers import least_squares
from ..oneshot.solving import LayerRow, may_change
from ..oneshot.teacher import DenseStreams
from ..oneshot.training import output_tensor, over_ranks
from ..oneshot.walk import Walk, checkpoint_of
from .removal_report import ShrinkReport, text_of_zeros

RIDGE = 0.3  # the share of the mean of diag(X^T X) that holds a weight where it is; less gains less on other texts


def fit_blocks(
    data: CalibrationData, report: ShrinkReport, dense: nn.Module, path: str, kept: Sequence[int]
) -> ShrinkReport:
    """Fit blocks of the smaller model in place, which has the `kept` blocks of the list `path`; return its report."""
    fitting, rows = BlockFitting(dense, data, path, kept), list[LayerRow]()
    if kept[0] > 0:
        fitting.left_out.append(f"{path}: the first blocks were removed, and no block before them makes up for them")
    if any(fitting.is_fitted) and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
        fitting.left_out.append(f"{path}: nothing is fitted under torch.autocast; call shrink_layers outside of it")
    elif any(fitting.is_fitted):
        checkpoint_of(data, None, "shrink_layers")  # checks that ranks have the same model
        try:
            walk = Walk(data, (), blocks=path)
        except SparsityError:
            fitting.left_out.append(f"{path}: not fitted, since a block does not read what the one before gives alone")
        else:
            rows = walk.run("shrink_layers", None, fitting)[1]
    zeros = "" if is_elsewhere(dense) else text_of_zeros(dense, data.model)
    return replace(report, compensation=tuple(rows), zeros=zeros, left_out=(*report.left_out, *fitting.left_out))


class BlockFitting(DenseStreams):
    """The dense model in a walk; it fits each block before removed ones to the hidden states after these.

    Let X be the inputs that the last matrix W of a block has in the smaller model, and R what the block's outputs lack.
    Then W + D is the new matrix, where D minimizes ||R - X D^T||^2 + ridge ||D||^2 and is zero where W is. ReplaceMe
    (arXiv 2505.02819) folds a linear map into the same matrix. As in `recover`, a row with more than the typical norm
    counts by its relative error.
    """

    row, caller = LayerRow, "shrink_layers"

    def __init__(self, dense: nn.Module, data: CalibrationData, path: str, kept: Sequence[int]) -> None:
        super().__init__(dense, data)
        count = len([*dense.get_submodule(path).children()])
        self.is_fitted = [after - at > 1 for at, after in zip(kept, [*kept[1:], count], strict=True)]
        self.left_out = list[str]()
        named = [*data.model.named_parameters(remove_duplicate=False)]
        uses = Counter(id(p) for _, p in named)  # by name below, since offloaded parameters are replaced
        self._shared = {name for name, p in (*named, *named_tensors(data.model)) if uses[id(p)] > 1}

    def match(self, at: int) -> LayerRow | None:
        """Fit the block of this number if blocks after it were removed, and return a row of the report."""
        if not self.is_fitted[at]:
            return None
        start, name = time.perf_counter(), self.walk.names[at]
        last = self._last_product(at)
        if last is None:
            why = "its output is not the sum of a product with a weight of its own and of other terms"
            self.left_out.append(f"{name} (of the smaller model): not fitted, since {why}")
            return None
        gram, cross, (total, size) = self._sums(at, last)
        first, damped = last.whole(), damped_gram(gram[None], RIDGE)
        step = torch.where(last.scale == 0, 0, cross.mT / last.scale).mT @ damped_inverse(gram[None], RIDGE, name)[0]
        last.write(least_squares((first + step)[None], damped, last.mask[None])[0])
        moved = ((last.whole() - first).mT * last.scale).mT.double()
        rest = total + float((moved @ gram.double() * moved - 2 * moved * cross).sum())
        return LayerRow(
            tensor=f"{name}.{last.target.name}",
            before=(total / (size or 1)) ** 0.5,
            after=(max(rest, 0.0) / (size or 1)) ** 0.5,
            density=float(last.mask.float().mean()),
            seconds=time.perf_counter() - start,
        )

    def _last_product(self, at: int) -> "_LastProduct | None":
        """Return the last product in whose weight the output of a block is linear, as a change of the weight shows."""
        block, path = self.walk.blocks[at], f"{self.walk.names[at]}."
        tensors = {name for name, _ in named_tensors(block) if path + name not in self._shared}
        own = {name: owner_of(block, name) for name in weights_by_name(block) if name in tensors}
        recorder = Recorder(block, {name: owner for name, owner in own.items() if masking.is_parameter(*owner)})
        targets = [recorder.target(name, ("input_square",)) for name in recorder.tensors]
        found = {target.name: target for target in targets if target.adapter and target.adapter.has_gram}
        output, inputs = self._run(at, 0, [*found.values()])
        for name, (rows, *others) in reversed(inputs.items()):
            if not others and rows is not None and len(rows) == len(output):
                bias = f"{path}{name.rpartition('.')[0]}.bias"
                last = _LastProduct(found[name], rows, has_bias=bias not in self._shared)
                if last.mask.shape[0] == output.shape[1] and self._is_linear(at, last, rows, output):
                    return last
        return None

    def _is_linear(self, at: int, last: "_LastProduct", rows: Tensor, output: Tensor) -> bool:
        """Return whether other weights change the output of a block by s times what they change in the product."""
        first, generator = last.whole(), torch.Generator().manual_seed(0)
        changes, responses = list[Tensor](), list[Tensor]()
        try:
            for _ in range(2):  # where all rows are alike, any one response is s times the change
                half = torch.randint(2, first.shape, generator=generator, device="cpu").to(first)  # 0 or 1: no rounding
                last.write(first * half + last.is_bias * (half * first.square().mean().sqrt()))
                changes.append(last.inputs(rows) @ (last.whole() - first).mT)
                responses.append(self._run(at, 0, ())[0] - output)
        finally:
            last.write(first)
        change, changed, output = torch.cat(changes), torch.cat(responses), torch.cat([output, output])
        # Each row counts relative to its output, as rounding does.
        weights = 1 / output.square().sum(1, keepdim=True).clamp(min=torch.finfo(output.dtype).tiny)
        size = (weights * change.square()).sum(0)
        last.scale = (weights * change * changed).sum(0) / size.where(size > 0, 1)
        error, total = (weights * (changed - last.scale * change).square()).sum(), (last.scale.square() * size).sum()
        hidden = output_tensor(self.walk.streams[-1].hidden(0))  # may be in 16 bits where the block is in float32
        eps = max(torch.finfo(dtype).eps for dtype in (last.target.parameter.dtype, hidden.dtype))
        return bool(error <= eps * total) and bool(total > 0)

    def _run(self, at: int, index: int, targets: Sequence[Target]) -> tuple[Tensor, dict[str, list[Tensor | None]]]:
        """Return rows of the output of a block for a batch, and of inputs of weights (None for a part of a weight)."""
        inputs = dict[str, list[Tensor | None]]()

        def take(target: Target, product: Product, place: Place) -> None:
            read = target.adapter and target.adapter.reads(product, place, target.shape)
            is_whole = read and read.is_whole and product.kind == "matrix" and product.batch is None
            inputs.setdefault(target.name, []).append(_as_rows(product.inputs()) if is_whole else None)

        with Recording(targets, take=take) as recording:
            recording.token_mask = masks = self.data.token_masks[index]
            output = self.walk.streams[-1].output(self.walk.blocks[at], index, masks)
        return _as_rows(output_tensor(output)), inputs

    def _sums(self, at: int, last: "_LastProduct") -> tuple[Tensor, Tensor, list[float]]:
        """Return X^T X, R^T X, and the sums of squares of R and of the dense output, over all rows that count."""
        squares = [expected.double().square().sum(1) for expected, _ in self._targets(at)]
        logs = torch.stack([torch.stack([own[own > 0].log().sum(), (own > 0).sum()]) for own in squares]).sum(0)
        typical = float((over_ranks(logs)[0] / logs[1].clamp(min=1)).exp())  # the squared norm of a row
        sums = list[Tensor]()
        for index, (expected, places) in enumerate(self._targets(at)):
            output, inputs = self._run(at, index, [last.target])
            (rows,) = inputs[last.target.name]
            assert rows is not None
            x, rest, size = last.inputs(rows[places]), expected - output[places], expected.square().sum(1)[:, None]
            weights = typical / size.clamp(min=typical)
            total = torch.stack([(weights * rest.square()).sum(), (weights * size).sum()]).double()
            of_batch = [(x * weights).mT @ x, rest.mT @ (x * weights), total]
            sums = [own + new for own, new in zip(sums, of_batch, strict=True)] if sums else of_batch
        gram, cross, total = map(over_ranks, sums)
        return gram, cross, total.tolist()

    def _targets(self, at: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each batch, the rows of the dense hidden states that count, and their numbers."""
        chain, orders = self.walk.chain_of[at], set[bool]()
        for index, masks in enumerate(self.data.token_masks):
            hidden = output_tensor(self.streams[chain].hidden(index))
            places = torch.arange(hidden[..., 0].numel(), device=hidden.device).view(*hidden.shape[:-1], 1)
            places = token_rows(places, masks.masks[self.walk.chains[chain].of_decoder], orders)[:, 0]
            yield _as_rows(hidden)[places], places


class _LastProduct:
    """A product X W^T + b of a block whose output is s times it, plus what depends on neither W nor b."""

    def __init__(self, target: Target, rows: Tensor, has_bias: bool) -> None:
        self.target, bias = target, getattr(target.module, "bias", None)
        self.bias: Tensor | None = None
        self.mask = may_change(self.whole())  # what may change, of the matrix with the bias as its last column
        if has_bias and isinstance(bias, nn.Parameter) and bias.shape == self.mask.shape[:1]:
            self.bias = bias.detach()
            self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], 1)
        self.is_bias = torch.arange(self.mask.shape[1], device=rows.device) == rows.shape[1]
        self.scale = rows.new_ones(self.mask.shape[0])  # s, such as a layer scale

    def inputs(self, rows: Tensor) -> Tensor:
        """Return inputs of the matrix, with ones for the bias."""
        return rows if self.bias is None else torch.cat([rows, torch.ones_like(rows[:, :1])], 1)

    def whole(self) -> Tensor:
        """Return the matrix, [outputs, inputs], with its bias as the last column."""
        assert self.target.adapter is not None
        weight = masking.used_weight(self.target.module, self.target.tensor_name)
        matrix = _as_rows(self.target.adapter.matrix(weight))
        return matrix if self.bias is None else torch.cat([matrix, self.bias[:, None].to(matrix)], 1)

    def write(self, whole: Tensor) -> None:
        """Write the matrix and its bias into the parameters."""
        parameter, adapter, columns = self.target.parameter.detach(), self.target.adapter, ~self.is_bias
        assert adapter is not None
        new, kept = (adapter.weight(matrix[None, :, columns], parameter.shape) for matrix in (whole, self.mask))
        parameter.copy_(torch.where(kept, new, parameter))
        if self.bias is not None:
            self.bias.copy_(whole[:, -1])


def _as_rows(x: Tensor) -> Tensor:
    """Return a copy of a tensor as rows, in float32 at least."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32), copy=True).reshape(-1, x.shape[-1])
