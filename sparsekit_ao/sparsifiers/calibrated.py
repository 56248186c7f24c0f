"""`Calibrated`: what a sparsifier has whose scores read statistics of inputs or gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..calibration import NEEDS, Recorder, Recording, Statistics
from ..errors import SparsityError
from ..models.running import TokenMask
from ..scores import needs_of
from .base import MaskSparsifier
from .groups import PruningGroup


class Calibrated(MaskSparsifier):
    """Calibration of a sparsifier, to be inherited before `BudgetSparsifier` by classes with such scores.

    >>> from sparsekit_ao.sparsifiers import BudgetSparsifier
    >>> from sparsekit_ao.sparsifiers.groups import groups_by_name
    >>> class Mine(Calibrated, BudgetSparsifier):
    ...     def _update_all(self):
    ...         self._update_groups(self.pruning_groups(), groups_by_name(self.groups))
    >>> sparsifier = Mine(0.5, score="wanda")
    >>> sparsifier.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    >>> sparsifier.calibrate([torch.ones(3, 4)]); sparsifier.step(); sparsifier.check()
    1
    """

    pruning_groups: Callable[..., tuple[PruningGroup, ...]]  # of `BudgetSparsifier`

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorder = Recorder(None, {})
        super().__init__(*args, **kwargs)

    def _needs(self) -> dict[str, tuple[str, ...]]:
        """{tensor_fqn: the statistics that scores read of it}."""
        needs_of_tensors: dict[str, tuple[str, ...]] = {}
        recorder = self.recorder
        for pruning in self.pruning_groups():
            needs = needs_of(pruning.score)
            for name in pruning.scored(recorder.of) if needs else ():
                needs_of_tensors[name] = tuple(dict.fromkeys((*needs_of_tensors.get(name, ()), *needs)))
        return needs_of_tensors

    def move_to(self, model: nn.Module) -> None:
        """Continue on a model that has the masked modules under other names; statistics are renamed with them."""
        before = [g["tensor_fqn"] for g in self.groups]
        super().move_to(model)
        names = dict(zip(before, (g["tensor_fqn"] for g in self.groups), strict=True))
        collected = {names.get(name, name): statistics for name, statistics in self._recorder.collected.items()}
        for name, statistics in collected.items():
            statistics.name = name
        self._recorder = Recorder(None, {}, collected)

    def calibrate(
        self,
        batches: Iterable[Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        token_mask: TokenMask = None,
        needs: Sequence[str] = (),
        progress: bool = True,
    ) -> Recording | None:
        """Record the statistics that scores need while the model runs; they add to those recorded before.

        The sums do not depend on how tokens are split into batches, up to float32 rounding. Over ranks each one runs
        its own batches, and all statistics are summed at the end.

        Args:
            batches: Each is passed to the model, in eval mode: dicts as keyword arguments, tuples and lists as
                positional ones. None returns a context for a loop of your own (`with sparsifier.calibrate() as c:`).
                There `c.token_mask` may be set before each forward pass.
            forward: Called instead, `(model, batch) -> output`; scores of gradients need the loss from it.
            token_mask: Which tokens count: a key of the batches, or a function of a batch. None takes the
                `attention_mask` of batches that have one, and False counts all tokens. A mask applies to layers that
                read [batch, tokens, inputs]; convolutions, and layers that read something else (a pooled token, say),
                count every position.
            needs: More statistics for every tensor, some of `calibration.NEEDS`.
            progress: Show a progress bar on a terminal.

        Raises:
            SparsityError: No score needs statistics, no batches, layers whose inputs cannot be recorded, inputs, losses
                or gradients that are not finite. Hooks are removed and no statistics are kept then.

        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> from sparsekit_ao import ScopeSparsifier
        >>> sparsifier = ScopeSparsifier(0.5, score="wanda")
        >>> sparsifier.prepare(model)
        >>> sparsifier.calibrate([torch.ones(3, 4)])
        >>> with sparsifier.calibrate() as c:
        ...     output = model(torch.ones(2, 4))
        >>> sparsifier.statistics["0.weight"].tokens
        5
        """
        self.require_prepared("calibrate")
        assert self.model is not None
        for need in needs:
            if need not in NEEDS:
                raise SparsityError(f"calibrate: needs are some of {', '.join(map(repr, NEEDS))}, got {need!r}")
        of_scores, names = self._needs(), [g["tensor_fqn"] for g in self.groups]
        wanted = {name: (*of_scores.get(name, ()), *needs) for name in names if needs or of_scores.get(name)}
        if not wanted:
            raise SparsityError(
                "calibrate: no score of this sparsifier needs statistics; give one that does (score='wanda'), or name "
                "them in needs="
            )
        if batches is not None:
            self.recorder.run(batches, wanted, forward, token_mask, progress)
            return None
        if forward is not None or token_mask is not None:
            raise SparsityError("calibrate: forward and token_mask need batches; in a context set c.token_mask instead")
        return self.recorder.recording(wanted)

    def _statistics_of(self, name: str) -> Statistics:
        return self.recorder.of(name)

    @property
    def recorder(self) -> Recorder:
        """The statistics of the sparsified tensors, and what records them."""
        names = [g["tensor_fqn"] for g in self.groups]  # which change where adapters are merged
        if [*self._recorder.tensors] != names:
            tensors = {g["tensor_fqn"]: (g["module"], g["tensor_name"]) for g in self.groups}
            self._recorder = Recorder(self.model, tensors, self._recorder.collected)
        return self._recorder

    @property
    def statistics(self) -> Mapping[str, Statistics]:
        """{tensor_fqn: what was recorded for it}."""
        recorder = self.recorder
        return {name: recorder.of(name) for name in recorder.tensors if name in recorder.collected}

    def forget_statistics(self) -> None:
        """Free all statistics; the next calibration starts anew."""
        self._recorder.collected.clear()

    def _after_prepare(self) -> None:
        super()._after_prepare()
        self._recorder = Recorder(None, {}, self._recorder.collected if self._resumes else {})

    def _extra_state(self) -> dict[str, Any]:
        statistics = self._recorder.saved()
        return {**super()._extra_state(), **({"statistics": statistics} if statistics else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As `MaskSparsifier.load_state_dict`; statistics replace the present ones."""
        self.require_prepared("load_state_dict")
        saved = state_dict.get("statistics", {}) if isinstance(state_dict, Mapping) else {}
        loaded = self.recorder.loaded(saved)
        super().load_state_dict(state_dict, strict)
        self._recorder.collected = loaded
