"""Weights that hooks compute, and parameters with names of methods: refused by name, or left out with the reason."""

import re

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

from sparsekit_ao import ProximalSparsifier, ScopeSparsifier, SparsityError, prune

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")


def of_own_hook(layer):
    """The layer with a weight that a hook of the user computes."""
    layer.raw = layer._parameters.pop("weight")
    layer.weight = layer.raw.tanh()
    layer.register_forward_pre_hook(lambda m, inputs: setattr(m, "weight", m.raw.tanh()))
    return layer


COMPUTED = {
    "spectral_norm": (nn.utils.spectral_norm, "torch.nn.utils.spectral_norm computes it"),
    "weight_norm": (nn.utils.weight_norm, "use torch.nn.utils.parametrizations.weight_norm"),
    "prune": (lambda m: torch.nn.utils.prune.l1_unstructured(m, "weight", 0.5), "masked by torch.nn.utils.prune"),
    "prune twice": (
        lambda m: torch.nn.utils.prune.random_unstructured(COMPUTED["prune"][0](m), "weight", 0.5),
        "masked by torch.nn.utils.prune",
    ),
    "own hook": (of_own_hook, "A hook computes it; make it a parameter"),
}
CONFIGS = {"name": {"tensor_fqn": "0.fc.weight"}, "glob": {"tensor_fqn": "*weight"}, "class": {"module": nn.Linear}}


def model_of(kind):
    torch.manual_seed(0)
    return nn.Sequential(nn.ModuleDict({"fc": COMPUTED[kind][0](nn.Linear(8, 8))}), nn.Linear(8, 64))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_computed_weight_is_refused_by_name(kind, config):
    model = model_of(kind)
    names = [*model.state_dict()]
    with pytest.raises(
        SparsityError, match=r"config\[0\]: '0.fc.weight' is no parameter.*" + re.escape(COMPUTED[kind][1])
    ):
        ScopeSparsifier().prepare(model, [CONFIGS[config]])
    assert [*model.state_dict()] == names


@pytest.mark.parametrize("exclude", [["0.fc.weight"], ["0.fc"], ["0"], ["*fc*"], []])
@pytest.mark.parametrize("kind", COMPUTED)
def test_without_a_config_a_computed_weight_is_left_out_with_the_reason(kind, exclude):
    reason = f"left out by exclude[0] ({exclude[0]!r})" if exclude else COMPUTED[kind][1]
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model_of(kind), None, exclude=exclude)
    assert reason in sparsifier.report().skipped["0.fc.weight"] and len(sparsifier.groups) == 1
    if exclude:
        ScopeSparsifier().prepare(model_of(kind), [CONFIGS["glob"]], exclude=exclude)
    _, report = prune(model_of(kind), 0.5, exclude=exclude)
    assert [row.tensor for row in report][-1] == "1.weight"
    assert kind == "weight_norm" or reason in report.left_out["0.fc.weight"]


def test_the_advice_for_spectral_norm_works():
    model = model_of("spectral_norm")
    ScopeSparsifier().prepare(model, [{"tensor_fqn": "1.weight"}])
    with pytest.raises(SparsityError) as e:
        ScopeSparsifier().prepare(model, [CONFIGS["name"]])
    eval(re.search(r"Call (torch\S+ '\w+'\))", str(e.value)).group(1), {"torch": torch, "model": model})
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model, [CONFIGS["name"]])
    sparsifier.step()
    sparsifier.squash_mask()
    assert (model[0]["fc"].weight == 0).float().mean() == 0.5


class PackedExperts(nn.Module):
    """Three experts, with weights of the names that are given."""

    def __init__(self, first, second):
        super().__init__()
        self.register_parameter(first, nn.Parameter(torch.randn(3, 8, 8)))
        self.register_parameter(second, nn.Parameter(torch.randn(3, 8, 8)))


@pytest.mark.parametrize("names", [("keys", "values"), ("items", "up"), ("update", "pop"), ("clear", "keys")])
def test_names_of_methods_of_a_module_dict_are_refused_by_name(names):
    model = nn.Sequential(nn.Linear(8, 8), PackedExperts(*names))
    before = [*model.state_dict()]
    with pytest.raises(
        SparsityError, match=rf"config\[0\]: '1.{names[0]}' has a name that is an attribute of nn.ModuleDict"
    ):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": f"1.{names[0]}"}])
    assert [*model.state_dict()] == before
    pruned, report = prune(model, 0.5)  # which needs no parametrization
    assert len(report) == 3 and not report.left_out
    assert all((weight == 0).float().mean() == 0.5 for weight in pruned[1].parameters())
    ProximalSparsifier(sparsity_level=0.5, conditioner=None).prepare(model, [{"tensor_fqn": f"1.{names[0]}"}])
    sparsifier = ScopeSparsifier()
    sparsifier.prepare(model)
    assert {f"1.{name}" for name in names if name != "up"} == {*sparsifier.report().skipped}


@pytest.mark.parametrize("name", ["keys", "values", "items", "update", "pop"])
def test_a_tied_parameter_is_refused_under_its_other_name_too(name):
    model = nn.Sequential(nn.Linear(8, 8), nn.Module(), nn.Linear(8, 8))
    model[1].register_parameter(name, model[0].weight)
    before = [*model.state_dict()]
    with pytest.raises(SparsityError, match=r"config\[0\]: '0.weight' has a name that is an attribute of"):
        ScopeSparsifier().prepare(model, [{"tensor_fqn": "0.weight"}])
    assert [*model.state_dict()] == before
    ScopeSparsifier().prepare(model)
    assert not nn.utils.parametrize.is_parametrized(model[0]) and nn.utils.parametrize.is_parametrized(model[2])
