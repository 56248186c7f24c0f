"""Random models, configs and sequences of operations, drawn from a seed, each checked against `fuzz_oracle`.

`run(seed)` prepares a model of one to three small tensors, applies a sequence of operations, and compares all masks
after each of them. Everything is drawn from the seed, so a failure is repeated by its number:

    PYTHONPATH=.:tests python -c "import fuzz; fuzz.run(4711)"
"""

import copy
import math
import random
import warnings

import torch
from fuzz_cases import DTYPES, LEVELS, draw_case, fill
from fuzz_oracle import connected, masks_of
from stock import reloaded

from sparsekit_ao import ScopeSparsifier, SparsityError

OPERATIONS = ["step"] * 4 + ["level", "level", "save", "dtype", "weights", "move", "one", "one"]


class Sequence:
    """One model with its sparsifier, and the masks that it should have (flat lists of bools)."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.model, self.tensors, self.config = draw_case(self.rng)
        self.model.to(self.rng.choice(DTYPES))
        self.log = [f"{t.fqn} {t.shape} {e}" for t, e in zip(self.tensors, self.config, strict=True)]
        self.signs = any(s.norm is None for t in self.tensors for s in t.stages)
        self.sparsifier = ScopeSparsifier()
        self.sparsifier.prepare(self.model, copy.copy(self.config))
        self.given = [g["sparsity_level"] for g in self.sparsifier.groups]
        self.expected = [[True] * math.prod(t.shape) for t in self.tensors]
        self.refill()

    def modules(self):
        return [self.model[t.fqn.split(".")[0]] for t in self.tensors]

    def dense(self):
        return [m.parametrizations.weight.original.detach() for m in self.modules()]

    def masks(self):
        return [self.sparsifier.mask(t.fqn) for t in self.tensors]

    def refill(self):
        for weight in self.dense():
            fill(self.rng, weight, self.signs)

    def chosen(self, only=None):
        return masks_of(self.tensors, self.dense(), self.expected, only)

    def verify(self):
        for tensor, mask, expected in zip(self.tensors, self.masks(), self.expected, strict=True):
            assert mask.dtype == torch.bool and tuple(mask.shape) == tensor.shape
            found = mask.reshape(-1).tolist()
            assert found == expected, f"{tensor.fqn}: mask {show(found)}, expected {show(expected)}"

    def step(self):
        self.expected = self.chosen()
        self.sparsifier.step()
        self.verify()
        self.sparsifier.check()

    def level(self):
        """Write a level as torch.ao's schedulers do, to all tensors that share budgets with one."""
        start = self.rng.randrange(len(self.tensors))
        own = connected(self.tensors, start)
        if any(all(s.budget for s in self.tensors[t].stages) for t in own):
            return
        level = self.rng.choice([*LEVELS, self.given[start]])
        for t in own:
            self.sparsifier.groups[t]["sparsity_level"] = level
            tensor = self.tensors[t]
            tensor.level = None if tensor.nnz is not None and level == self.given[t] else level
        self.log[-1] += f" {level} of {sorted(own)}"

    def save(self):
        """Save, let other masks be chosen, and load."""
        saved, expected = reloaded(self.sparsifier.state_dict()), self.expected
        self.refill()
        if self.rng.random() < 0.5:
            self.step()
        self.sparsifier.load_state_dict(saved)
        self.expected = expected

    def dtype(self):
        dtype = self.rng.choice(DTYPES)
        self.log[-1] += f" {dtype}"
        self.model.to(dtype)

    def weights(self):
        self.refill()

    def move(self):
        """Store the weights in another memory layout."""
        for module, weight in zip(self.modules(), self.dense(), strict=True):
            order = self.rng.sample(range(weight.ndim), weight.ndim)
            inverse = [order.index(k) for k in range(weight.ndim)]
            module.parametrizations.weight.original.data = weight.permute(order).contiguous().permute(inverse)

    def one(self):
        """Choose the mask of one tensor anew, at times at another level."""
        at = self.rng.randrange(len(self.tensors))
        tensor, own, keys = self.tensors[at], connected(self.tensors, at), {}
        before = tensor.level
        if len(own) == 1 and self.rng.random() < 0.4 and not all(s.budget for s in tensor.stages):
            keys["sparsity_level"] = self.rng.choice(LEVELS)
            if keys["sparsity_level"] != self.sparsifier.groups[at]["sparsity_level"]:
                tensor.level = keys["sparsity_level"]
        self.log[-1] += f" {tensor.fqn} {keys}"
        self.expected = self.chosen(own)
        self.sparsifier.update_mask(self.modules()[at], "weight", **keys)
        tensor.level = before
        self.verify()

    def look(self):
        """Reports and checks change nothing; the weight is the masked one."""
        report = self.sparsifier.report()
        for row, expected in zip(report, self.expected, strict=True):
            assert math.isclose(row.sparsity, 1 - sum(expected) / max(len(expected), 1)), row
        for module, weight, expected in zip(self.modules(), self.dense(), self.expected, strict=True):
            mask = torch.tensor(expected, dtype=torch.bool).reshape(weight.shape)
            assert same(module.weight, torch.where(mask, weight, 0)), "the weight is not the masked one"
        try:
            self.sparsifier.check()
        except SparsityError:
            assert self.chosen() != self.expected, "check() failed where all masks are right"
        str(report), repr(self.sparsifier)

    def squash(self):
        masked = [torch.where(m, w, 0).clone() for m, w in zip(self.masks(), self.dense(), strict=True)]
        squash(self.sparsifier)
        for module, expected in zip(self.modules(), masked, strict=True):
            assert same(module.weight, expected), "squash wrote other weights"
            assert not hasattr(module, "parametrizations")


def squash(sparsifier):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a level changed since the last step
        sparsifier.squash_mask()


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(1.5), other.nan_to_num(1.5))


def show(mask):
    return "".join(".X"[kept] for kept in mask)


def run(seed):
    """One sequence; an AssertionError or another error, with the sequence so far as a note, if anything is wrong."""
    sequence = None
    try:
        sequence = Sequence(seed)
        for _ in range(sequence.rng.randint(3, 8)):
            name = sequence.rng.choice(OPERATIONS)
            sequence.log.append(name)
            getattr(sequence, name)()
            sequence.verify()
            if sequence.rng.random() < 0.3:
                sequence.log.append("look")
                sequence.look()
        sequence.log.append("squash")
        sequence.squash()
    except Exception as e:
        e.add_note("\n".join([f"fuzz.run({seed})", *(sequence.log if sequence else ())]))
        raise
