"""Calibration of a prepared sparsifier: statistics of its layers for the scores that need them."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .. import masking
from ..calibration import (
    NEEDS,
    Calibration,
    Form,
    Statistics,
    Target,
    check_statistics,
    checked_batches,
    form_of,
    run_batches,
    shown,
)
from ..errors import SparsityError
from .base import MaskSparsifier
from .config import TensorGroup


class CalibratedSparsifier(MaskSparsifier):
    """A sparsifier whose scores may need statistics of calibration data."""

    _statistics: Mapping[str, Statistics] = {}
    _forms: Mapping[str, Form | None] = {}

    @abstractmethod
    def _needs(self) -> Mapping[str, tuple[str, ...]]:
        """{tensor_fqn: the statistics that its scores need}."""

    def calibrate(
        self,
        batches: Iterable[Any] | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        *,
        where: str | Callable[[Any], Tensor] | None = None,
        needs: Sequence[str] = (),
        progress: bool = True,
    ) -> Calibration | None:
        """Record the statistics that scores need while the model runs; they add to those recorded before.

        The sums do not depend on how tokens are split into batches, up to float32 rounding. Over ranks each one runs
        its own batches, and all statistics are summed at the end.

        Args:
            batches: each is passed to the model, in eval mode: dicts as keyword arguments, tuples and lists as
                positional ones. None returns a context for a loop of your own (`with sparsifier.calibrate() as c:`),
                in which `c.where` may be set before each forward pass.
            forward: `(model, batch) -> output`, called instead; scores of gradients need the loss from it.
            where: which tokens count, such as an attention mask: a key of the batches, or a function of a batch. It
                applies to layers that read [batch, tokens, inputs]; convolutions, and layers that read something else
                (a pooled token, say), count every position.
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
        calibration = Calibration(self._targets(self._needs(), needs), self._add_statistics)
        if batches is None:
            if forward is not None or where is not None:
                raise SparsityError("calibrate: forward and where need batches; in a context set c.where instead")
            return calibration
        checked_batches(batches, where, forward, "calibrate")
        with calibration:
            run_batches(calibration, self.model, shown(batches, "calibrate", progress), forward, where)
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
        self._forms, self._statistics = {}, {}

    def _targets(self, own: Mapping[str, Sequence[str]], more: Sequence[str] = ()) -> list[Target]:
        for need in more:
            if need not in NEEDS:
                raise SparsityError(f"calibrate: needs are some of {', '.join(map(repr, NEEDS))}, got {need!r}")
        found = []
        for group in self.groups:
            fqn = group["tensor_fqn"]
            needs = tuple(dict.fromkeys((*own.get(fqn, ()), *more)))
            if needs:
                found.append(self._target(group, needs))
        if not found:
            raise SparsityError(
                "calibrate: no score of this sparsifier needs statistics; give one that does (score='wanda'), or name "
                "them in needs="
            )
        return found

    def _target(self, group: TensorGroup, needs: tuple[str, ...]) -> Target:
        module, name = group["module"], group["tensor_name"]
        return Target(
            name=group["tensor_fqn"],
            module=module,
            tensor_name=name,
            parameter=masking.parameter_under(module, name),
            shape=tuple(self._live_mask(group).shape),
            needs=needs,
            form=self._form(group),
        )

    def _form(self, group: TensorGroup) -> Form | None:
        """How a tensor is a matrix; found for all tensors at once and kept until `prepare`."""
        assert self.model is not None
        if set(self._forms) != {g["tensor_fqn"] for g in self.groups}:
            attentions = {id(m.out_proj): m for m in self.model.modules() if isinstance(m, nn.MultiheadAttention)}
            self._forms = {g["tensor_fqn"]: form_of(g["module"], g["tensor_name"], attentions) for g in self.groups}
        return self._forms[group["tensor_fqn"]]

    def _statistics_of(self, group: TensorGroup) -> Statistics:
        fqn = group["tensor_fqn"]
        found = self._statistics.get(fqn)
        if found is None:
            return Statistics(name=fqn, shape=tuple(self._live_mask(group).shape), form=self._form(group))
        found.form = self._form(group)
        return found

    def _add_statistics(self, found: Mapping[str, Statistics]) -> None:
        merged = dict(self._statistics)
        for name, new in found.items():
            if name in merged:
                merged[name].add(new.sums, new.tokens, new.passes)
            else:
                merged[name] = new
        self._statistics = merged

    def _pickled(self) -> dict[str, Any]:
        return {**super()._pickled(), "statistics": {name: s.saved() for name, s in self._statistics.items()}}

    def state_dict(self) -> dict[str, Any]:
        """As `MaskSparsifier.state_dict`, with the statistics if there are any."""
        saved = {name: s.saved() for name, s in self._statistics.items()}
        return {**super().state_dict(), **({"statistics": saved} if saved else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """As `MaskSparsifier.load_state_dict`; statistics replace the present ones."""
        self._need_prepared("load_state_dict")
        shapes = {g["tensor_fqn"]: tuple(self._live_mask(g).shape) for g in self.groups}
        saved = state_dict.get("statistics", {}) if isinstance(state_dict, Mapping) else {}
        if saved != {}:
            own = {g["tensor_fqn"]: self._form(g) for g in self.groups}
            blank = {fqn: Statistics(name=fqn, shape=shapes[fqn], form=form) for fqn, form in own.items()}
            check_statistics(saved, blank, "load_state_dict: ")
        super().load_state_dict(state_dict, strict)
        devices = {g["tensor_fqn"]: self._live_mask(g).device for g in self.groups}
        self._statistics = {
            name: Statistics(
                name=name,
                shape=shapes[name],
                form=None,
                tokens=own["tokens"],
                passes=own["passes"],
                sums={k: v.to(devices[name], copy=True) for k, v in own["sums"].items()},
            )
            for name, own in saved.items()
            if name in shapes
        }
