"""The proximal map of `t ||.||_2` for many blocks at once, Euclidean or under a positive diagonal.

Blocks are the rows of a matrix (`dim=-1`: [blocks, elements]) or its columns (`dim=-2`: [elements, blocks]), float32 or
float64. Sums over elements are pairwise, and numbers of long blocks are float64, so that blocks of a million elements
are as exact as small ones. Blocks whose squares overflow or underflow are computed again in a wider range. Results are
in the memory of the `Buffers` that are given.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import SparsityError
from .elements import Buffers

PART = 1 << 18  # elements on CPU that are computed together, so that their intermediate values stay in cache
SHORT = 16  # elements that are added in their own dtype where the sum must be exact
SEGMENT = 1024  # elements that are added in their own dtype; longer blocks have float64 numbers
STEPS = 64  # guarded Newton steps at most, if no limit is given
FIXED = 3  # Newton steps that all blocks make before those that need more are separated; those make one, ...
ROUNDS = 4  # ... and are separated again, so often before their steps are guarded
FEW = 0.75  # open blocks are separated if they are fewer than this fraction; to do so costs as 4 elements more
_FAR = 2.0  # Newton steps that multiply s by more than this are lengthened


def shrink(v: Tensor, t: Tensor, dim: int = -1, buffers: Buffers | None = None) -> Tensor:
    """`v max(0, 1 - t / ||v||)` for each block; t >= 0 has no dimension, or is [blocks].

    >>> shrink(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor(1.0))
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    buffers = Buffers() if buffers is None else buffers
    if v.shape[dim] == 1:
        return _shrink_single(v, _along(t.to(v.dtype), dim), buffers)
    size = norms(v, dim, buffers)
    factor = torch.where(size > t, (size - t) / size, torch.where(size.isnan(), size, 0))
    factor = torch.where((t == 0) | size.isinf(), 1, factor)  # an infinite block stays visible
    return _times(v, _along(factor.to(v.dtype), dim), out=buffers("work", v.shape, v))


def shrink_conditioned(
    v: Tensor,
    h: Tensor,
    t: Tensor,
    dim: int = -1,
    *,
    atol: float = math.inf,
    max_iter: int | None = None,
    buffers: Buffers | None = None,
) -> Tensor:
    """`argmin_w 1/2 (w - v)' D (w - v) + t ||w||` for each block, D = diag(h).

    w = 0 where `||Dv|| <= t`. Else, with `c = t / h`, `w_i = v_i s / (s + c_i)`, where `s = ||w||` is the root of
    `phi(s) = ||v / (s + c)|| = 1`. `1 / phi` is concave, so that Newton's method on it never passes the root from
    below; it starts at 0, and ends where the next step could not change the result.

    Args:
        v, h: of one shape; h >= 0.
        t: t >= 0, of no dimension or [blocks].
        dim: the dimension of a block's elements, -1 or -2.
        atol, max_iter: raise if after `max_iter` steps some |phi - 1| is above `atol`; by default there is no limit.
        buffers: memory for the result.

    Raises:
        SparsityError: see `max_iter`.

    >>> shrink_conditioned(torch.tensor([[3.0, 4.0]]), torch.full((1, 2), 4.0), torch.tensor(4.0))
    tensor([[2.4000, 3.2000]])
    """
    buffers = Buffers() if buffers is None else buffers
    if v.shape[dim] == 1:
        c = torch.div(_along(t.to(v.dtype), dim), h, out=buffers("c", v.shape, v))
        return _shrink_single(v, c, buffers)
    steps = _Steps(atol, max_iter)
    s, unsafe = _start(v, h, t, dim, buffers, steps)
    if unsafe is not None:
        own, metric = (_blocks_at(x, unsafe, dim) for x in (v, h))
        careful = _shrink_carefully(own, metric, _of(t, unsafe), dim, steps)
    c = buffers("c", v.shape, v)  # may be the memory of h
    for metric, out in _parts(dim, h, c):
        torch.div(_along(t.to(v.dtype), dim), metric, out=out)
    root = _Root(v, c, dim, buffers, steps)
    w = root.solution(root.find(s, s > 0))
    return w if unsafe is None else w.index_copy_(1 + dim, unsafe, careful)


def norms(v: Tensor, dim: int = -1, buffers: Buffers | None = None) -> Tensor:
    """The 2-norm of each block; finite where it is representable, whatever the squares are."""
    total = sums(v * v if buffers is None else torch.mul(v, v, out=buffers("work", v.shape, v)), dim)
    limits = torch.finfo(v.dtype)
    is_safe = (total > limits.tiny / limits.eps) & (total <= limits.max)
    if bool(is_safe.all()) or not bool((~is_safe & (v != 0).any(dim)).any()):
        return total.sqrt()
    scaled, factor = _scaled(v, dim)
    wide = sums(scaled * scaled, dim).sqrt() / factor
    return torch.where(is_safe, total.sqrt(), wide.to(total.dtype))


def sums(x: Tensor, dim: int, is_exact: bool = False) -> Tensor:
    """Sums over `dim` (negative): pairwise in segments, which are added in float64 where there are several.

    With `is_exact` at most `SHORT` numbers are added in their own dtype.
    """
    size, segment = x.shape[dim], SHORT if is_exact else SEGMENT
    if is_exact and dim == -1 and SHORT < size <= SEGMENT:
        return x.sum(-1, dtype=torch.float64)
    if size <= SHORT and dim == -1 and x.is_contiguous():  # a product with ones is faster than the sum of short rows
        return torch.mv(x.view(-1, size), x.new_ones(size)).view(x.shape[:-1])
    if size <= segment:
        return x.sum(dim)
    whole = size // segment * segment
    parts = x.narrow(dim, 0, whole).unflatten(dim, (-1, segment)).sum(dim)
    total = parts.sum(dim, dtype=torch.float64)
    return total + x.narrow(dim, whole, size - whole).sum(dim) if whole < size else total


def _along(numbers: Tensor, dim: int) -> Tensor:
    """Numbers of blocks, to be broadcast over their elements."""
    return numbers.unsqueeze(dim) if numbers.ndim else numbers


def _of(numbers: Tensor, at: Tensor) -> Tensor:
    """The numbers of these blocks; one without dimensions is of all."""
    return numbers[at] if numbers.ndim else numbers


def _blocks_at(x: Tensor, at: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """The blocks with these indices, in the memory of `out`."""
    shape = (len(at), x.shape[1]) if dim == -1 else (x.shape[0], len(at))
    place = None if out is None else out.view(-1)[: math.prod(shape)].view(shape)
    return torch.index_select(x, 1 + dim, at, out=place)


def _times(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """A product in which no factor of 0 gives -0."""
    return torch.addcmul(torch.zeros((), dtype=x.dtype, device=x.device), x, factor, out=out)


def _parts(dim: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of blocks, cut along the elements where a block is longer than a part."""
    size = tensors[0].shape[dim]
    if tensors[0].device.type != "cpu" or size <= PART:
        yield tensors
        return
    for at in range(0, size, PART):
        yield tuple(x.narrow(dim, at, min(PART, size - at)) for x in tensors)


def _shrink_single(v: Tensor, c: Tensor, buffers: Buffers) -> Tensor:
    """Blocks of one element: |v| less c, or 0."""
    out, low = buffers("work", v.shape, v), torch.neg(c, out=buffers("low", c.shape, c))
    return torch.sub(v, torch.clamp(v, low, c, out=out), out=out)


def _start(
    v: Tensor, h: Tensor, t: Tensor, dim: int, buffers: Buffers, steps: "_Steps"
) -> tuple[Tensor, Tensor | None]:
    """The point that Newton's method reaches from 0, `(||Dv|| - t) ||Dv||^2 / sum(h (h v)^2)`; 0 where `||Dv|| <= t`.

    Also the indices of blocks whose sums overflow or underflow, or None; their s is 0.
    """
    found = []
    for own, metric in _parts(dim, v, h):
        work = buffers("work", (2, *own.shape), own)
        torch.mul(own, metric, out=work[0]).mul_(work[0])
        torch.mul(work[0], metric, out=work[1])
        found.append(sums(work, dim))
    both = found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.float64)
    limits = torch.finfo(v.dtype)
    squares, weighted = both.add_(limits.tiny)  # a block of zeros has no quotient
    force = squares.sqrt()
    if steps.limit == 0:
        steps.check(force / t - 1, force > t, done=0)
    s = force.sub_(t).mul_(squares).div_(weighted).clamp_(min=0)
    least, most = limits.tiny**0.5 / limits.eps, limits.max**0.5
    if float(both.amax()) < math.inf and float(s.amax()) < most and float(t.amin()) > least:
        return s, None
    unsafe = (~((both.amax(0) < math.inf) & (s < most) & (t > least))).nonzero().squeeze(-1)
    return s.index_fill_(0, unsafe, 0), unsafe


def _shrink_carefully(v: Tensor, h: Tensor, t: Tensor, dim: int, steps: "_Steps") -> Tensor:
    """As `shrink_conditioned` for all finite values, in float64 with every block scaled to 1; NaN if some is not."""
    scaled, factor = _scaled(v, dim)
    limits = torch.finfo(torch.float64)
    c = torch.div(_along(t.double() * factor, dim), h.double()).clamp_(limits.tiny, limits.max)
    root = _Root(scaled, c, dim, Buffers(), steps)
    is_kept = ~(root.sums_at(torch.zeros_like(factor))[0] <= 1)
    start = sums(scaled * scaled, dim).sqrt().clamp_(min=limits.tiny)
    s = torch.where(is_kept, root.find_slowly(start, is_kept & (t != 0)), 0)
    w = root.solution(s).div_(_along(factor, dim))
    w.masked_fill_(~v.isfinite().all(dim, keepdim=True), math.nan)
    return torch.where(_along((t == 0).expand(factor.shape), dim), v, w.to(v.dtype))


def _scaled(v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The blocks in float64, times a power of two each that makes the largest element about 1; and that factor."""
    largest = v.double().abs().amax(dim)
    exponent = torch.where((largest > 0) & largest.isfinite(), largest.log2().floor(), 0)
    factor = torch.exp2(-exponent.clamp(-1000, 1000))
    return v.double() * _along(factor, dim), factor


class _Steps(NamedTuple):
    """The accuracy that must be reached in a number of Newton steps; None: as many as are needed, and no error."""

    atol: float
    limit: int | None

    def check(self, misses: Tensor, is_open: Tensor, *, done: int) -> None:
        """Raise where the limit of steps is reached and phi misses 1 by more than `atol`."""
        if self.limit is None or done < self.limit or not bool(is_open.any()):
            return
        worst = float(misses[is_open].abs().max())
        if worst > self.atol:
            raise SparsityError(
                f"soft_threshold: no convergence to atol={self.atol:g} in {self.limit} steps (missed by "
                f"{worst:.1e}). Raise max_iter, or leave it out."
            )


class _Root:
    """The root s of `||v / (s + c)|| = 1` for each block."""

    def __init__(self, v: Tensor, c: Tensor, dim: int, buffers: Buffers, steps: _Steps) -> None:
        self.v, self.c, self.dim, self.buffers, self.steps = v, c, dim, buffers, steps
        limits = torch.finfo(v.dtype)
        self.step, self.noise, self.tiny = limits.eps**0.5 / 2, 4 * limits.eps, limits.tiny
        self.parts = [
            (*own, *(work := buffers("work", (2, *own[0].shape), v)).unbind(), work) for own in _parts(dim, v, c)
        ]

    def sums_at(self, s: Tensor, is_exact: bool = False) -> Tensor:
        """[2, blocks]: the sums of `u^2` and `u^2 / (s + c)` for `u = v / (s + c)`."""
        one, found = _along(s.to(self.v.dtype), self.dim), []
        for v, c, u, below, work in self.parts:
            torch.add(c, one, out=below)
            torch.div(v, below, out=u).mul_(u)
            torch.div(u, below, out=below)
            found.append(sums(work, self.dim, is_exact))
        return found[0] if len(found) == 1 else torch.stack(found).sum(0, dtype=torch.float64)

    def solution(self, s: Tensor) -> Tensor:
        """`v s / (s + c)`, and 0 where s is 0, in the memory of c."""
        number, one = (_along(x, self.dim) for x in (s.to(self.v.dtype), s.clamp(min=self.tiny).to(self.v.dtype)))
        for v, c, *_ in self.parts:
            _times(v, torch.div(number, c.add_(one), out=c), out=c)
        return self.c

    def find(self, s: Tensor, is_open: Tensor | None = None, rounds: int = ROUNDS) -> Tensor:
        """The root where `is_open` (None: everywhere), or 0, from a point s >= 0 below it, by Newton's method."""
        size = self.v.shape[self.dim]
        count = len(s) if is_open is None else int(is_open.sum())
        if not count:
            return s
        if is_open is not None and count * (size + 4) < FEW * size * len(s):
            at = is_open.nonzero().squeeze(-1)
            memory = (self.buffers(f"{name}{rounds}", self.v.shape, self.v) for name in "vc")
            v, c = (_blocks_at(x, at, self.dim, m) for x, m in zip((self.v, self.c), memory, strict=True))
            rest = _Root(v, c, self.dim, self.buffers, self.steps)
            return s.index_copy(0, at, rest.find(s[at], rounds=rounds))
        if self.steps.limit is not None or rounds == 0:
            return self.find_slowly(s, s > 0 if is_open is None else is_open).to(s.dtype)
        steps = FIXED if rounds == ROUNDS else 1
        for step in range(1, steps + 1):
            squares, slope = self.sums_at(s, step == steps).unbind()
            below = squares.sqrt().add_(1).mul_(slope).add_(self.tiny)
            before, s = s, torch.addcdiv(s, squares.sub(1).mul_(squares), below).clamp_(min=0).to(s.dtype)
        return self.find(s, ((s - before).abs_() <= before.mul_(self.step)).logical_not_(), rounds - 1)

    def find_slowly(self, s: Tensor, is_kept: Tensor) -> Tensor:
        """The root where `is_kept`, from any s, between bounds that each step may only narrow."""
        largest = torch.linalg.vector_norm(self.v, math.inf, self.dim).to(s.dtype)
        s = torch.where(s.isfinite(), s, largest)  # squares of u overflow where s is far below the root
        low, high = torch.zeros_like(s), torch.full_like(s, math.inf)
        for step in range(1, 1 + (STEPS if self.steps.limit is None else self.steps.limit)):
            s = s.to(self.v.dtype).to(s.dtype)  # as the elements see it
            squares, slope = self.sums_at(s, True)
            phi = squares.sqrt()
            newton = s + squares * (phi - 1) / slope
            is_open = is_kept & ((newton - s).abs() > self.step * s) & ((phi - 1).abs() > self.noise)
            best = torch.where(newton > 0, newton, s)
            if not bool(is_open.any()):
                return best
            self.steps.check(phi - 1, is_open, done=step)
            high = torch.where(phi < 1, torch.minimum(high, s), high)
            low = torch.maximum(low, torch.where(phi < 1, newton, torch.maximum(newton, s)))
            s = torch.where(is_open, self._next(s, phi, newton, slope / squares, low, high), best)
        return s

    def _next(self, s: Tensor, phi: Tensor, newton: Tensor, rate: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Newton's point, which is never above the root; a longer step where that is far, a middle where it is out."""
        longer = s * torch.exp((phi.log() / (s * rate)).clamp(max=20.0))  # Newton's method on log phi over log s
        far = (newton * torch.minimum(longer, high)).sqrt()
        found = torch.where((phi > 1) & (newton > _FAR * s) & (far > newton), far, newton)
        middle = torch.where(low > 0, (low * high).sqrt(), high / 1024)
        return torch.where(found >= low, found, middle)
