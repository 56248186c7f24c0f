"""torch.ao schedulers over plain schedules: they write levels into a sparsifier's groups and open its mask updates.

torch.ao's own `LambdaSL` and `CubicSL` work on every sparsifier here as they are; `ScheduleSL` adds an interval and
resumes exactly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.ao.pruning import BaseScheduler, BaseSparsifier

from .errors import SparsityError
from .schedules import Schedule

__all__ = ["ScheduleSL"]


class ScheduleSL(BaseScheduler):
    """Set every group's sparsity level to `schedule(step)`, and let masks change only every `interval` steps.

    The loop is torch.ao's: `optimizer.step(); sparsifier.step(); scheduler.step()`. Construct it after
    `sparsifier.prepare`; construction counts as step 0.

    Args:
        sparsifier: a prepared sparsifier.
        schedule: step -> level in [0, 1], or a list with one a group.
        interval: the level is read, and the masks are chosen anew, at steps that are multiples of this.
        last_epoch: the step before the first; -1 starts at 0.

    >>> from sparsekit_ao import ScopeSparsifier, schedules
    >>> sparsifier = ScopeSparsifier()
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(8, 8)), None)
    >>> scheduler = ScheduleSL(sparsifier, schedules.linear(0.0, 10, end=0.5), interval=5)
    >>> levels = []
    >>> for step in range(10):
    ...     sparsifier.step()
    ...     scheduler.step()
    ...     levels.append(sparsifier.groups[0]["sparsity_level"])
    >>> levels
    [0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.25, 0.5]
    """

    def __init__(
        self,
        sparsifier: BaseSparsifier,
        schedule: Schedule | Sequence[Schedule],
        interval: int = 1,
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        if not isinstance(sparsifier, BaseSparsifier):
            raise SparsityError(f"ScheduleSL needs a torch.ao sparsifier, got {type(sparsifier).__name__}")
        if not sparsifier.groups:
            raise SparsityError("ScheduleSL needs a prepared sparsifier; call sparsifier.prepare(model, config) first")
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise SparsityError(f"ScheduleSL: interval must be an int >= 1, got {interval!r}")
        schedules = list(schedule) if isinstance(schedule, Sequence) else [schedule] * len(sparsifier.groups)
        if len(schedules) != len(sparsifier.groups):
            raise SparsityError(
                f"ScheduleSL: {len(schedules)} schedules for {len(sparsifier.groups)} groups; give one, or one a group"
            )
        self.schedules = schedules
        self.interval = interval
        super().__init__(sparsifier, last_epoch, verbose)

    def get_sl(self) -> list[float]:
        """The levels of this step: new ones at a multiple of the interval, else those that stand."""
        if self.last_epoch % self.interval:
            return [group["sparsity_level"] for group in self.sparsifier.groups]
        return [schedule(self.last_epoch) for schedule in self.schedules]

    def step(self, epoch: int | None = None) -> None:
        """Advance one step; masks may then change only if it is a multiple of the interval."""
        super().step(epoch)
        self.sparsifier.enable_mask_update = self.last_epoch % self.interval == 0

    def state_dict(self) -> dict[str, Any]:
        """Counters and levels, without the sparsifier and the schedules; `torch.load(weights_only=True)` reads it."""
        return {k: v for k, v in self.__dict__.items() if k not in ("sparsifier", "schedules")}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, levels and mask updates included."""
        own = {k: list(v) if isinstance(v, list) else v for k, v in state_dict.items()}
        levels = own["_last_sl"]
        if len(levels) != len(self.sparsifier.groups):
            raise SparsityError(
                f"ScheduleSL.load_state_dict: saved for {len(levels)} groups, here are {len(self.sparsifier.groups)}"
            )
        self.__dict__.update(own)
        for group, level in zip(self.sparsifier.groups, levels, strict=True):
            group["sparsity_level"] = level
        self.sparsifier.enable_mask_update = self.last_epoch % self.interval == 0
