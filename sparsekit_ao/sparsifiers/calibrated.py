"""`Calibrated`: calibration, for sparsifiers whose scores read statistics of inputs or gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ..calibration import NEEDS, Recorder, Recording, Statistics
from ..errors import SparsityError
from ..models.progress import public_call
from ..models.running import TokenMask
from ..scores import needs_of
from .base import MaskSparsifier
from .groups import PruningGroup


class Calibrated(MaskSparsifier):
    """Mixin that adds calibration to a sparsifier; list it before `BudgetSparsifier` among the base classes.

    >>> from sparsekit_ao.sparsifiers import BudgetSparsifier
    >>> class Mine(Calibrated, BudgetSparsifier):
    ...     pass
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
        """Continue on a model that has the masked modules under other names, and rename their statistics."""
        before = [g["tensor_fqn"] for g in self.groups]
        super().move_to(model)
        names = dict(zip(before, (g["tensor_fqn"] for g in self.groups), strict=True))
        collected = {names.get(name, name): statistics for name, statistics in self._recorder.collected.items()}
        for name, statistics in collected.items():
            statistics.name = name
        self._recorder = Recorder(None, {}, collected)

    @public_call
    def calibrate(
        self,
        batches: Iterable[Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        token_mask: TokenMask = None,
        needs: Sequence[str] = (),
        progress: bool = True,
    ) -> Recording | None:
        """Run the model on calibration data and record the statistics that its scores need.

        The statistics are added to those recorded before. They do not depend on how tokens are split into batches, up
        to float32 rounding. In distributed training every rank runs its own batches, and the statistics of all ranks
        are summed at the end.

        Args:
            batches: The calibration data. Each batch is passed to the model in eval mode: a dict as keyword arguments,
                a tuple or list as positional ones, anything else as the only argument. None (default) returns a context
                for a loop of your own (`with sparsifier.calibrate() as c:`), in which `c.token_mask` may be set before
                each forward pass.
            forward: A function `(model, batch) -> output` that is called instead of the model. If a score needs
                gradients, it must return the loss.
            token_mask: Which tokens count: a key of the batches, or a function that returns a batch's mask. None
                (default) takes the `attention_mask` of batches that have one, and for what a decoder computes from its
                inputs the `decoder_attention_mask`, if any; False counts all tokens. The mask
                applies to layers that read [batch, tokens, inputs]; convolutions and layers that read something else,
                such as a pooled token, count every position.
            needs: Names of further statistics to record for every tensor, from `calibration.NEEDS`.
            progress: If True (default), show a progress bar on a terminal or in a notebook.

        Raises:
            SparsityError: No score needs statistics, there are no batches, the inputs of a layer cannot be recorded, or
                inputs, losses or gradients are not finite. Hooks are then removed, and no statistics are kept.

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
            self.recorder.run(batches, wanted, forward, token_mask)
            return None
        if forward is not None or token_mask is not None:
            raise SparsityError("calibrate: forward and token_mask need batches; in a context set c.token_mask instead")
        return self.recorder.recording(wanted)

    def _statistics_of(self, name: str) -> Statistics:
        return self.recorder.of(name)

    @property
    def recorder(self) -> Recorder:
        """The `Recorder` that records and holds the statistics of the sparsified tensors."""
        if not self._recorder.tensors:  # after `prepare`, and where names have changed since
            tensors = {g["tensor_fqn"]: (g["module"], g["tensor_name"]) for g in self.groups}
            self._recorder = Recorder(self.model, tensors, self._recorder.collected)
        return self._recorder

    @property
    def statistics(self) -> Mapping[str, Statistics]:
        """A dict {tensor_fqn: the `Statistics` recorded for it}."""
        recorder = self.recorder
        return {name: recorder.of(name) for name in recorder.tensors if name in recorder.collected}

    def forget_statistics(self) -> None:
        """Delete all statistics, so that the next calibration starts from zero."""
        self._recorder.collected.clear()

    def _after_prepare(self) -> None:
        super()._after_prepare()
        self._recorder = Recorder(None, {})

    def _extra_state(self) -> dict[str, Any]:
        statistics = self._recorder.saved()
        return {**super()._extra_state(), **({"statistics": statistics} if statistics else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state as `MaskSparsifier.load_state_dict` does; its statistics replace the present ones."""
        self.require_prepared("load_state_dict")
        saved = state_dict.get("statistics", {}) if isinstance(state_dict, Mapping) else {}
        loaded = self.recorder.loaded(saved)
        super().load_state_dict(state_dict, strict)
        self._recorder.collected = loaded
