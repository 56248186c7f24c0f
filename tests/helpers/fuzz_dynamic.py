"""Random training runs with dynamic and proximal sparsifiers, each copied and resumed, against a plain run.

`run(seed)` trains two equal models. One of them is saved and loaded, copied, pickled and looked at in between; masks,
weights and optimizer states must stay the same bits as those of the other one, and every budget must be kept.

    PYTHONPATH=.:tests python -c "import fuzz_dynamic; fuzz_dynamic.run(4711)"
"""

import copy
import pickle
import random
import warnings

import torch
from growing import OPTIMIZERS
from stock import reloaded
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import GMP, SET, SNFS, DynamicSparsifier, ProximalSparsifier, RigL, SparsityError, Static
from sparsekit_ao.schedules import linear

OPERATIONS = ["train"] * 6 + ["save", "save", "copy", "pickle", "skip", "stop", "look"]
SIZES = [1, 2, 3, 4, 5, 7, 8, 12]
RULES = {
    "prune": ["magnitude", "global", "magnitude"],
    "grow": ["gradient", "random", "momentum", None],
    "redistribute": [None, None, "gradient", "momentum", "nonzero"],
    "init": ["erk", "er", "uniform", "random"],
    "state_init": ["zero", "grad"],
    "update_fraction": [0.0, 0.3, 0.9],
}


class Flat(nn.Module):
    def forward(self, x):
        return x.flatten(1)


def draw_model(rng):
    """A function that makes a small model, always the same, and the shape of its input."""
    inputs, hidden, outputs = (rng.choice(SIZES) for _ in range(3))
    if rng.random() < 0.3:
        layers = [lambda: nn.Conv2d(inputs, hidden, 2), nn.Tanh, Flat, lambda: nn.Linear(hidden * 4, outputs)]
        shape = (3, inputs, 3, 3)
    else:
        layers, shape = [lambda: nn.Linear(inputs, hidden), nn.Tanh, lambda: nn.Linear(hidden, outputs)], (3, inputs)
    seed, dtype = rng.randrange(1000), rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])

    def make():
        torch.manual_seed(seed)
        return nn.Sequential(*(layer() for layer in layers)).to(dtype)

    return make, shape


def draw_structure(rng, model):
    """Config entries and default arguments that fit the weights."""
    kind = rng.choice(["elements", "rows", "blocks", "n:m", "coupled"])
    names = [n for n, p in model.named_parameters() if p.ndim > 1]
    entries = [{"tensor_fqn": n} for n in names]
    if kind == "rows":
        return entries, {"scope_shape": (1,)}
    if kind == "blocks":
        return entries, {"block_shape": (rng.choice([1, 2]), rng.choice([1, 2, 3])), "edge": "partial"}
    if kind == "n:m":
        return entries, {"scope_shape": (1, rng.choice([2, 4])), "edge": "partial"}
    first, last = (dict(model.named_parameters())[n].shape for n in names)
    if kind == "coupled" and len(first) == 2 and first[0] == last[1]:
        entries[0] |= {"block_shape": (1, -1), "block_coupling": "hidden"}
        entries[1] |= {"block_shape": (-1, 1), "coupling_order": (1, 0), "block_coupling": "hidden"}
    return entries, {}


def draw_method(rng, structure):
    """A function of an optimizer that makes the sparsifier."""
    level, until, every = rng.choice([0.0, 0.3, 0.5, 0.8, 0.95]), rng.choice([2, 5, 20]), rng.choice([1, 2, 3])
    kind = rng.choice(["RigL", "SET", "SNFS", "GMP", "Static", "rules", "proximal", "strength"])
    common = {"update_every": every, "seed": rng.randrange(100), **structure}
    if kind == "proximal":
        return kind, lambda o: ProximalSparsifier(sparsity_level=level, optimizer=o, **structure)
    if kind == "strength":
        return kind, lambda o: ProximalSparsifier(strength=linear(0.0, level / 10, until), optimizer=o, **structure)
    if kind in ("RigL", "SNFS"):
        return kind, lambda o: {"RigL": RigL, "SNFS": SNFS}[kind](level, o, until=until, **common)
    if kind == "GMP":
        return kind, lambda o: GMP(level, o, until=max(until, every), **common)
    if kind in ("SET", "Static"):
        common = {k: v for k, v in common.items() if kind == "SET" or k != "update_every"}
        return kind, lambda o: {"SET": SET, "Static": Static}[kind](level, o, **common)
    rules = {key: rng.choice(values) for key, values in RULES.items()}
    return f"{kind} {rules}", lambda o: DynamicSparsifier(level, o, until=until, **common, **rules)


class Run:
    """A model in training: (model, optimizer, sparsifier), and what is saved of it."""

    def __init__(self, make, optimizer, method, entries):
        self.model = make()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.sparsifier = method(self.optimizer)
        self.sparsifier.prepare(self.model, copy.deepcopy(entries))

    def parts(self):
        return self.model, self.optimizer, self.sparsifier

    def backward(self, x, goal):
        self.optimizer.zero_grad()
        dtype = next(self.model.parameters()).dtype
        found = self.model(x.to(dtype))
        F.mse_loss(found, torch.full_like(found, goal)).backward()
        self.optimizer.step()

    def tensors(self):
        """Everything that must stay the same bits: masks, weights, optimizer state."""
        found = {g["tensor_fqn"]: self.sparsifier.mask(g["tensor_fqn"]) for g in self.sparsifier.groups}
        states = self.optimizer.state_dict()["state"]
        state = {f"{k} {key}": v for k, own in states.items() for key, v in own.items() if isinstance(v, torch.Tensor)}
        return {**found, **{f"parameter {k}": p.detach() for k, p in enumerate(self.model.parameters())}, **state}


class Sequence:
    """Two equal runs, of which `first` is disturbed and `plain` is not."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.make, self.shape = draw_model(self.rng)
        self.entries, structure = draw_structure(self.rng, self.make())
        kind, self.method = draw_method(self.rng, structure)
        names = [n for n in OPTIMIZERS if "fused" not in n]
        self.kind = self.rng.choice([n for n in names if n != "sgd"] if "momentum" in kind or kind == "SNFS" else names)
        if "grad" in kind and "state_init" in kind:
            self.kind = "adam"
        self.log = [f"{kind}, {self.kind}, {structure}, {self.make()}"]
        self.first, self.plain = (self.fresh() for _ in range(2))
        self.is_refused = False  # the last step was
        self.old = []  # (mask, its values) of copies that must not change any more

    def fresh(self):
        return Run(self.make, self.kind, self.method, self.entries)

    def both(self, call):
        for run in (self.first, self.plain):
            call(run)

    def train(self):
        """A step of both; the first one may be saved, copied or pickled between optimizer and sparsifier."""
        x, goal = torch.randn(self.shape, generator=torch.Generator().manual_seed(len(self.log))), self.rng.random()
        self.both(lambda run: run.backward(x, goal))
        if self.rng.random() < 0.2:
            name = self.rng.choice(["save", "copy", "pickle"])
            self.log.append(f"{name} in the middle")
            getattr(self, name)()
        self.step()

    def step(self):
        """A step of both sparsifiers; both raise where it would prune what every tensor or scope must keep."""
        errors = []
        for run in (self.first, self.plain):
            try:
                run.sparsifier.step()
            except SparsityError as e:
                if "prune a smaller fraction" not in str(e):
                    raise
                errors.append(str(e))
        assert not errors or (len(errors) == 2 and errors[0] == errors[1]), errors
        self.is_refused = bool(errors)

    def skip(self):
        """The optimizer takes no step, as gradient scaling does."""
        self.step()

    def stop(self):
        self.both(lambda run: setattr(run.sparsifier, "enable_mask_update", not run.sparsifier.enable_mask_update))

    def save(self):
        saved = reloaded([part.state_dict() for part in self.first.parts()])
        self.first = self.fresh()
        for part, state in zip(self.first.parts(), saved, strict=True):
            part.load_state_dict(state)

    def copy(self):
        self.old += [(t, t.clone()) for t in self.first.tensors().values()]
        self.first.model, self.first.optimizer, self.first.sparsifier = copy.deepcopy(self.first.parts())

    def pickle(self):
        data, (model, optimizer, _) = pickle.dumps(self.first.sparsifier), self.first.parts()
        states = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        self.first.model = self.make()
        self.first.optimizer = OPTIMIZERS[self.kind](self.first.model.parameters())
        self.first.sparsifier = pickle.loads(data)
        self.first.sparsifier.prepare(self.first.model)
        self.first.sparsifier.attach(self.first.optimizer)
        for part, state in zip(self.first.parts(), states, strict=False):
            part.load_state_dict(state)

    def look(self):
        for row in self.first.sparsifier.report():
            assert 0 <= row.sparsity <= 1, row
        str(self.first.sparsifier.report()), repr(self.first.sparsifier)

    def verify(self):
        first, plain = self.first.tensors(), self.plain.tensors()
        assert first.keys() == plain.keys(), first.keys() ^ plain.keys()
        for name, t in first.items():
            assert t.dtype == plain[name].dtype and torch.equal(t.nan_to_num(7), plain[name].nan_to_num(7)), name
        for mask, values in self.old:
            assert torch.equal(mask.nan_to_num(7), values.nan_to_num(7)), "a tensor of a copy changed"
        if not isinstance(self.first.sparsifier, ProximalSparsifier):
            self.first.sparsifier.check()
            if not self.is_refused:  # else the optimizer's step is still in dropped weights
                self.verify_zeros()

    def verify_zeros(self):
        for group in self.first.sparsifier.groups:
            mask = self.first.sparsifier.mask(group["tensor_fqn"]) != 0
            weight = group["module"].parametrizations.weight.original
            assert not bool(weight[~mask].any()), f"{group['tensor_fqn']}: dropped weights are not zero"

    def end(self):
        """Squash both; optimizers keep the zeros."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the last step has changed what is dropped
            self.both(lambda run: run.sparsifier.squash_mask())
        pairs = zip(self.first.model.parameters(), self.plain.model.parameters(), strict=True)
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs), "squashed weights differ"


def run(seed):
    """One pair of runs, and whether the config was accepted; an error has the operations so far as a note."""
    sequence = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the mask update due in iteration|.*nearly empty")
            try:
                sequence = Sequence(seed)
            except SparsityError:  # budgets that cannot be shared, say
                return False
            for _ in range(sequence.rng.randint(4, 12)):
                name = sequence.rng.choice(OPERATIONS)
                sequence.log.append(name)
                getattr(sequence, name)()
                sequence.verify()
            sequence.log.append("end")
            sequence.end()
            return True
    except Exception as e:
        e.add_note("\n".join([f"fuzz_dynamic.run({seed})", *(sequence.log if sequence else ())]))
        raise
