"""The proximal map of `t ||.||_2` for many blocks at once, Euclidean or under a positive diagonal.

Blocks are the rows of a matrix (`dim=-1`: [blocks, elements]) or its columns (`dim=-2`: [elements, blocks]), float32 or
float64. Sums over elements are pairwise, and numbers of long blocks are float64, so that blocks of a million elements
are as exact as small ones. Squares that overflow or underflow are computed again in a wider range.
"""

import math

import torch
from torch import Tensor

from ..errors import SparsityError

SEGMENT = 64  # elements that are added in their own dtype; longer blocks have float64 numbers
STEPS = 64  # Newton steps at most, if no limit is given; some four are usual
FIXED = 3  # Newton steps that all blocks make before it is asked whether any needs more
_FAR = 2.0  # Newton steps that multiply s by more than this are lengthened


def shrink(v: Tensor, t: Tensor, dim: int = -1) -> Tensor:
    """`v max(0, 1 - t / ||v||)` for each block; t >= 0 has no dimension, or is [blocks].

    >>> shrink(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor(1.0))
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    if v.shape[dim] == 1:
        return _shrink_single(v, _along(t.to(v.dtype), dim))
    size = norms(v, dim)
    factor = torch.where(size > t, (size - t) / size, torch.where(size.isnan(), size, 0))
    factor = torch.where((t == 0) | size.isinf(), 1, factor)  # an infinite block stays visible
    return (v * _along(factor.to(v.dtype), dim)).add_(0.0)  # which makes -0 zero


def shrink_conditioned(
    v: Tensor, h: Tensor, t: Tensor, dim: int = -1, *, atol: float = math.inf, max_iter: int | None = None
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

    Raises:
        SparsityError: see `max_iter`.

    >>> shrink_conditioned(torch.tensor([[3.0, 4.0]]), torch.full((1, 2), 4.0), torch.tensor(4.0))
    tensor([[2.4000, 3.2000]])
    """
    if v.shape[dim] == 1:
        return _shrink_single(v, _along(t.to(v.dtype), dim) / h)
    root, limits = _Root(v, dim, atol=atol, max_iter=max_iter), torch.finfo(v.dtype)
    force, s = root.start(h, t)
    is_kept = force > t
    is_safe = (~is_kept | ((s > 0) & s.isfinite())) & ~force.isnan() & (t > limits.tiny**0.5 / limits.eps)
    if not bool(is_safe.all()):
        return _shrink_carefully(v, h, t, dim, atol=atol, max_iter=max_iter)
    torch.div(_along(t.to(v.dtype), dim), h, out=root.c)
    s = root.find(torch.where(is_kept, s, 1), is_kept, is_below=True)
    return root.factors(torch.where(is_kept, s, 0)).mul_(v).add_(0.0)  # which makes -0 zero


def norms(v: Tensor, dim: int = -1) -> Tensor:
    """The 2-norm of each block; finite where it is representable, whatever the squares are."""
    total = sums(v * v, dim)
    limits = torch.finfo(v.dtype)
    is_safe = (total > limits.tiny / limits.eps) & (total <= limits.max)
    if bool(is_safe.all()) or not bool((~is_safe & (v != 0).any(dim)).any()):
        return total.sqrt()
    scaled, factor = _scaled(v, dim)
    wide = sums(scaled * scaled, dim).sqrt() / factor
    return torch.where(is_safe, total.sqrt(), wide.to(total.dtype))


def sums(x: Tensor, dim: int) -> Tensor:
    """Sums over `dim` (negative): pairwise in segments, which are added in float64 where there are several."""
    size = x.shape[dim]
    if size <= SEGMENT:
        return x.sum(dim)
    whole = size // SEGMENT * SEGMENT
    parts = x.narrow(dim, 0, whole).unflatten(dim, (-1, SEGMENT)).sum(dim)
    total = parts.sum(dim, dtype=torch.float64)
    return total + x.narrow(dim, whole, size - whole).sum(dim) if whole < size else total


def _along(numbers: Tensor, dim: int) -> Tensor:
    """Numbers of blocks, to be broadcast over their elements."""
    return numbers.unsqueeze(dim) if numbers.ndim else numbers


def _shrink_single(v: Tensor, c: Tensor) -> Tensor:
    """Blocks of one element: |v| less c, or 0."""
    return v - torch.minimum(torch.maximum(v, -c), c)


def _shrink_carefully(v: Tensor, h: Tensor, t: Tensor, dim: int, *, atol: float, max_iter: int | None) -> Tensor:
    """As `shrink_conditioned` for all finite values, in float64 with every block scaled to 1; NaN if some is not."""
    scaled, factor = _scaled(v, dim)
    limits = torch.finfo(torch.float64)
    root = _Root(scaled, dim, atol=atol, max_iter=max_iter)
    torch.div(_along(t.double() * factor, dim), h.double(), out=root.c).clamp_(limits.tiny, limits.max)
    is_kept = ~(root.sums_at(torch.zeros_like(factor))[0] <= 1)
    is_open = is_kept & (t != 0)
    start = sums(scaled * scaled, dim).sqrt().clamp_(min=limits.tiny)
    s = root.find(start, is_open, is_below=False)
    w = root.factors(torch.where(is_kept, s, 0)).mul_(scaled).div_(_along(factor, dim))
    w.masked_fill_(_along(~is_kept, dim), 0).masked_fill_(~v.isfinite().all(dim, keepdim=True), math.nan)
    return torch.where(_along((t == 0).expand(factor.shape), dim), v, w.to(v.dtype))


def _scaled(v: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The blocks in float64, times a power of two each that makes the largest element about 1; and that factor."""
    largest = v.double().abs().amax(dim)
    exponent = torch.where((largest > 0) & largest.isfinite(), largest.log2().floor(), 0)
    factor = torch.exp2(-exponent.clamp(-1000, 1000))
    return v.double() * _along(factor, dim), factor


class _Root:
    """The root s of `||v / (s + c)|| = 1` for each block of v; `c` is to be filled by the caller."""

    def __init__(self, v: Tensor, dim: int, *, atol: float, max_iter: int | None) -> None:
        self.v, self.dim, self.atol, self.max_iter = v, dim, atol, max_iter
        self.c, self.work = torch.empty_like(v), v.new_empty((2, *v.shape))
        limits = torch.finfo(v.dtype)
        self.step, self.noise = limits.eps**0.5 / 4, 4 * limits.eps

    def start(self, h: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """`||Dv||`, and the point that Newton's method reaches from 0, `(||Dv|| - t) ||Dv||^2 / sum(h (h v)^2)`."""
        torch.mul(self.v, h, out=self.work[0]).mul_(self.work[0])
        torch.mul(self.work[0], h, out=self.work[1])
        squares, weighted = sums(self.work, self.dim)
        force = squares.sqrt()
        if self.max_iter == 0:
            self._check(force / t - 1, force > t, steps=0)
        return force, (force - t) * (squares / weighted)

    def sums_at(self, s: Tensor) -> Tensor:
        """[2, blocks]: the sums of `u^2` and `u^2 / (s + c)` for `u = v / (s + c)`."""
        u, below = self.work.unbind()
        torch.add(self.c, _along(s.to(self.v.dtype), self.dim), out=below)
        torch.div(self.v, below, out=u).mul_(u)
        torch.div(u, below, out=below)
        return sums(self.work, self.dim)

    def factors(self, s: Tensor) -> Tensor:
        """`s / (s + c)`, by which v is to be multiplied."""
        one = _along(s.to(self.v.dtype), self.dim)
        below = torch.add(self.c, one, out=self.work[0])
        return torch.div(one, below, out=below)

    def find(self, s: Tensor, is_kept: Tensor, *, is_below: bool) -> Tensor:
        """The root where `is_kept`, from any positive s, or one that `is_below` it.

        Newton's method; after the first steps between bounds that each step may only narrow.
        """
        if is_below and self.max_iter is None:
            for _ in range(FIXED):
                before, s = s, self._newton(s)
            if not bool((is_kept & ~((s - before).abs() <= self.step * before)).any()):
                return s
        low, high = torch.zeros_like(s), torch.full_like(s, math.inf)
        for step in range(1, 1 + (STEPS if self.max_iter is None else self.max_iter)):
            s = s.to(self.v.dtype).to(s.dtype)  # as the elements see it
            squares, slope = self.sums_at(s)
            phi = squares.sqrt()
            newton = s + squares * (phi - 1) / slope
            is_open = is_kept & ((newton - s).abs() > self.step * s) & ((phi - 1).abs() > self.noise)
            best = torch.where(newton > 0, newton, s)
            if not bool(is_open.any()):
                return best
            self._check(phi - 1, is_open, steps=step)
            high = torch.where(phi < 1, torch.minimum(high, s), high)
            low = torch.maximum(low, torch.where(phi < 1, newton, torch.maximum(newton, s)))
            s = torch.where(is_open, self._next(s, phi, newton, slope / squares, low, high), best)
        return s

    def _newton(self, s: Tensor) -> Tensor:
        squares, slope = self.sums_at(s)
        return (squares.sqrt() - 1).mul_(squares).div_(slope).add_(s.to(self.v.dtype))

    def _next(self, s: Tensor, phi: Tensor, newton: Tensor, rate: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Newton's point, which is never above the root; a longer step where that is far, a middle where it is out."""
        longer = s * torch.exp((phi.log() / (s * rate)).clamp(max=20.0))  # Newton's method on log phi over log s
        far = (newton * torch.minimum(longer, high)).sqrt()
        found = torch.where((phi > 1) & (newton > _FAR * s) & (far > newton), far, newton)
        middle = torch.where(low > 0, (low * high).sqrt(), high / 1024)
        return torch.where(found >= low, found, middle)

    def _check(self, misses: Tensor, is_open: Tensor, *, steps: int) -> None:
        """Raise where the limit of steps is reached and phi misses 1 by more than `atol`."""
        if self.max_iter is None or steps < self.max_iter or not bool(is_open.any()):
            return
        worst = float(misses[is_open].abs().max())
        if worst > self.atol:
            raise SparsityError(
                f"soft_threshold: no convergence to atol={self.atol:g} in {self.max_iter} steps (missed by "
                f"{worst:.1e}). Raise max_iter, or leave it out."
            )
