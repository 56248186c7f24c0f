"""Calibration of a prepared sparsifier: statistics of its layers for the scores that need them."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .. import masking
from ..calibration import (
    NEEDS,
    Calibration,
    LayerAdapter,
    Statistics,
    Target,
    adapter_of,
    checked_batches,
    loaded_statistics,
    progress_bar,
    run_batches,
)
from ..errors import SparsityError
from .base import MaskSparsifier
from .config import TensorGroup


class CalibratedSparsifier(MaskSparsifier):
    """A sparsifier whose scores may need statistics of calibration data."""

    _statistics: Mapping[str, Statistics] = {}
    _adapters: Mapping[str, LayerAdapter | None] = {}

    @abstractmethod
    def _needs(self) -> Mapping[str, tuple[str, ...]]:
        """{tensor_fqn: the statistics that its scores need}."""

    def calibrate(
        self,
        batches: Iterable[Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        token_mask: str | Callable[[Any], Tensor] | None = None,
        needs: Sequence[str] = (),
        progress: bool = True,
    ) -> Calibration | None:
        """Record the statistics that scores need while the model runs; they add to those recorded before.

        The sums do not depend on how tokens are split into batches, up to float32 rounding. Over ranks each one runs
        its own batches, and all statistics are summed at the end.

        Args:
            batches: each is passed to the model, in eval mode: dicts as keyword arguments, tuples and lists as
                positional ones. None returns a context for a loop of your own (`with sparsifier.calibrate() as c:`),
                in which `c.token_mask` may be set before each forward pass.
            forward: `(model, batch) -> output`, called instead; scores of gradients need the loss from it.
            token_mask: which tokens count, such as an attention mask: a key of the batches, or a function of a batch.
                It applies to layers that read [batch, tokens, inputs]; convolutions, and layers that read something
                else (a pooled token, say), count every position.
            needs: more statistics for every tensor, some of `calibration.NEEDS`.
            progress: show a progress bar on a terminal.

        Raises:
            SparsityError: no score needs statistics, no batches, layers whose inputs cannot be recorded, inputs, losses
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
        self._need_prepared("calibrate")
        assert self.model is not None
        for need in needs:
            if need not in NEEDS:
                raise SparsityError(f"calibrate: needs are some of {', '.join(map(repr, NEEDS))}, got {need!r}")
        needs_of_scores = self._needs()
        needs_of_groups = [(g, (*needs_of_scores.get(g["tensor_fqn"], ()), *needs)) for g in self.groups]
        targets = [self._target(g, needs_of_group) for g, needs_of_group in needs_of_groups if needs_of_group]
        if not targets:
            raise SparsityError(
                "calibrate: no score of this sparsifier needs statistics; give one that does (score='wanda'), or name "
                "them in needs="
            )
        calibration = Calibration(targets, self._add_statistics)
        if batches is None:
            if forward is not None or token_mask is not None:
                raise SparsityError(
                    "calibrate: forward and token_mask need batches; in a context set c.token_mask instead"
                )
            return calibration
        checked_batches(batches, token_mask, forward, "calibrate")
        with calibration:
            bar = progress_bar(batches, "calibrate", progress, unit="batch")
            run_batches(calibration, self.model, bar, forward, token_mask)
        return None

    @property
    def statistics(self) -> Mapping[str, Statistics]:
        """{tensor_fqn: what was recorded for it}."""
        return {g["tensor_fqn"]: self._statistics_of(g) for g in self.groups if g["tensor_fqn"] in self._statistics}

    def forget_statistics(self) -> None:
        """Free all statistics; the next calibration starts anew."""
        self._statistics = {}

    def _forget_model(self) -> None:
        super()._forget_model()
        self._adapters, self._statistics = {}, {}

    def _target(self, group: TensorGroup, needs: Iterable[str]) -> Target:
        module, name = group["module"], group["tensor_name"]
        return Target(
            name=group["tensor_fqn"],
            module=module,
            tensor_name=name,
            parameter=masking.parameter_under(module, name),
            shape=tuple(self._live_mask(group).shape),
            needs=tuple(dict.fromkeys(needs)),
            adapter=self._adapter(group),
        )

    def _adapter(self, group: TensorGroup) -> LayerAdapter | None:
        """How a tensor is a matrix; looked up for all tensors at once and kept until `prepare`."""
        assert self.model is not None
        if set(self._adapters) != {g["tensor_fqn"] for g in self.groups}:
            attentions = {id(m.out_proj): m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)}
            adapters = [adapter_of(g["module"], g["tensor_name"], attentions) for g in self.groups]
            self._adapters = {g["tensor_fqn"]: a for g, a in zip(self.groups, adapters, strict=True)}
        return self._adapters[group["tensor_fqn"]]

    def _statistics_of(self, group: TensorGroup) -> Statistics:
        """What was recorded for a tensor, or statistics without sums."""
        statistics = self._statistics.get(group["tensor_fqn"]) or self._blank(group)
        statistics.adapter = self._adapter(group)  # which a copy or a pickle has not
        return statistics

    def _blank(self, group: TensorGroup) -> Statistics:
        shape = tuple(self._live_mask(group).shape)
        return Statistics(name=group["tensor_fqn"], shape=shape, adapter=self._adapter(group))

    def _add_statistics(self, new: Mapping[str, Statistics]) -> None:
        total = dict(self._statistics)
        for name, statistics in new.items():
            if name in total:
                total[name].add(statistics.sums, statistics.tokens, statistics.passes)
            else:
                total[name] = statistics
        self._statistics = total

    def _pickled(self) -> dict[str, Any]:
        return {**super()._pickled(), "statistics": {name: s.saved() for name, s in self._statistics.items()}}

    def state_dict(self) -> dict[str, Any]:
        """As `MaskSparsifier.state_dict`, with the statistics if there are any."""
        saved = {name: s.saved() for name, s in self._statistics.items()}
        return {**super().state_dict(), **({"statistics": saved} if saved else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As `MaskSparsifier.load_state_dict`; statistics replace the present ones."""
        self._need_prepared("load_state_dict")
        saved = state_dict.get("statistics", {}) if isinstance(state_dict, Mapping) else {}
        groups = {g["tensor_fqn"]: g for g in self.groups if saved != {}}
        devices = {name: self._live_mask(g).device for name, g in groups.items()}
        loaded = loaded_statistics(saved, {name: self._blank(g) for name, g in groups.items()}, devices)
        super().load_state_dict(state_dict, strict)
        self._statistics = loaded
