"""Random tensors and their structures for `fuzz.py`, each with the labels that `fuzz_oracle` takes.

All configs are valid; what must be refused is in `test_fuzz.py`.
"""

import math
from dataclasses import dataclass

import torch
from fuzz_oracle import Sparse, Stage, resolve, window_of
from torch import nn

SIZES = [1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 12]
LEVELS = [0.0, 0.1, 0.25, 1 / 3, 0.5, 0.7, 0.9, 1.0]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
EXTREMES = {  # powers of two whose squares are representable; sums of them are exact in any order
    torch.float16: [12, -20],
    torch.bfloat16: [52, -58],
    torch.float32: [52, -58],
    torch.float64: [52, 480, -480],
}


@dataclass(frozen=True)
class Chain:
    """A view function: torch view operations, one after the other."""

    steps: tuple

    def __call__(self, t):
        for name, *args in self.steps:
            t = t[tuple(slice(*a) for a in args)] if name == "slice" else getattr(t, name)(*args)
        return t


def signed(weight, name):
    return weight.clone()


def negative(weight, name):
    return -weight


def doubled(weight, name):
    return weight.double() * 2


def magnitude(weight, name):
    return weight.abs()


class Raw(nn.Module):
    """A module with one parameter of any shape."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def strided(rng, shape):
    """A float32 tensor of zeros of a random memory layout: row-major, permuted, or part of a larger tensor."""
    kind = rng.choice(["plain", "plain", "permuted", "gaps"])
    if kind == "plain" or not shape:
        return torch.zeros(shape)
    order = rng.sample(range(len(shape)), len(shape))
    steps = [rng.choice([1, 1, 2]) if kind == "gaps" else 1 for _ in shape]
    lead = [rng.choice([0, 1]) if kind == "gaps" else 0 for _ in shape]
    memory = torch.zeros([lead[k] + shape[k] * steps[k] for k in order])
    whole = memory.permute([order.index(k) for k in range(len(shape))])
    return whole[tuple(slice(a, a + n * s, s) for a, n, s in zip(lead, shape, steps, strict=True))]


def draw_module(rng):
    kind = rng.choice(["linear", "linear", "conv1d", "conv2d", "conv3d", "transposed", "embedding", "raw", "raw"])
    a, b, k = rng.choice(SIZES), rng.choice(SIZES), rng.choice([1, 2, 3])
    if kind == "raw":
        rank = rng.choice([0, 1, 1, 2, 3, 4])
        drawn = [rng.choice([*SIZES, *([0] if rng.random() < 0.1 else [])]) for _ in range(rank)]
        return Raw(strided(rng, tuple(n if at < 2 else min(n, 3) for at, n in enumerate(drawn))))
    module = {
        "linear": lambda: nn.Linear(b, a, bias=False),
        "conv1d": lambda: nn.Conv1d(b, a, k),
        "conv2d": lambda: nn.Conv2d(min(b, 4), a, (k, 2)),
        "conv3d": lambda: nn.Conv3d(2, min(a, 4), (k, 1, 2)),
        "transposed": lambda: nn.ConvTranspose2d(a, min(b, 4), (1, k)),
        "embedding": lambda: nn.Embedding(a, b),
    }[kind]()
    module.weight = nn.Parameter(strided(rng, tuple(module.weight.shape)))
    return module


def fill(rng, weight, signs):
    """Small integers times powers of two, one for all or (where scores are norms) several; NaN, infinities, -0.0."""
    extremes = EXTREMES[weight.dtype]
    scale = rng.choice([0, 0, 0, rng.choice(extremes)])
    scales = [0, rng.choice(extremes)] if rng.random() < 0.15 and not signs else [scale]
    pool = rng.choice([range(-7, 8), range(-7, 8), [1], [0, 0, 0, 1], [0]])
    special = [math.nan, math.inf, -math.inf, -0.0] if rng.random() < 0.15 else []
    numbers = []
    for _ in range(weight.numel()):
        wild = special and rng.random() < 0.2
        numbers.append(rng.choice(special) if wild else math.ldexp(rng.choice(pool), rng.choice(scales)))
    weight.copy_(torch.tensor(numbers, dtype=torch.float64).reshape(weight.shape))


def draw_chain(rng, shape):
    """Some view operations that suit any strides, as a `Chain`."""
    steps, t = [], torch.zeros(shape)
    for _ in range(rng.choice([1, 2])):
        kind = rng.choice(["permute", "unflatten", "slice"])
        if not t.ndim or (kind == "unflatten" and t.ndim > 4):
            continue
        dim = rng.randrange(t.ndim)
        if kind == "permute":
            step = ("permute", tuple(rng.sample(range(t.ndim), t.ndim)))
        elif kind == "unflatten" and t.shape[dim]:
            inner = rng.choice([d for d in range(1, t.shape[dim] + 1) if t.shape[dim] % d == 0])
            step = ("unflatten", dim, (t.shape[dim] // inner, inner))
        else:
            cut = rng.choice([(None, None, 2), (t.shape[dim] // 3, None), (None, t.shape[dim] // 2 + 1)])
            step = ("slice", *((None,) if k != dim else cut for k in range(t.ndim)))
        steps.append(step)
        t = Chain((step,))(t)
    return Chain(tuple(steps))


def draw_tile(rng, sizes, partial):
    """A tile of sizes: divisors, or any numbers where partial ones are allowed."""
    divisors = [[d for d in range(1, n + 1) if n % d == 0] or [1] for n in sizes]
    return tuple(
        rng.choice([1, 1, 2, 3, 4, n + 1, -1] if partial else [1, *own, -1])
        for n, own in zip(sizes, divisors, strict=True)
    )


def draw_scoring(rng):
    """(config keys, norm, score) of a stage."""
    kind = rng.choice([2, 2, 2, 1, math.inf, "signed", "negative", "doubled", "magnitude"])
    if isinstance(kind, str):
        score = {"signed": signed, "negative": negative, "doubled": doubled, "magnitude": magnitude}[kind]
        return {"score": rng.choice([score, "magnitude"]) if kind == "magnitude" else score}, None, score
    return ({} if kind == 2 and rng.random() < 0.5 else {"norm": kind}), kind, None


def draw_stage(rng, shape, scoring, *, block=None, scope=None, partial=None):
    """A stage given by shapes, under a random view unless the block is given."""
    partial = rng.random() < 0.4 if partial is None else partial
    keys, norm, score = scoring
    view = None
    if block is None and rng.random() < 0.5:
        view = draw_chain(rng, shape)
        if rng.random() < 0.5:
            seen = view(torch.zeros(shape))
            view = (tuple(seen.shape), seen.stride(), seen.storage_offset())
    sizes = window_of(view, shape).shape
    block = rng.choice([(), draw_tile(rng, sizes, partial)]) if block is None else block
    grid = [-(-n // b) for n, b in zip(sizes, resolve(block or (1,) * len(sizes), sizes), strict=True)]
    if scope is None:
        scope = draw_tile(rng, grid, partial)[: rng.randint(0, len(grid))]
    keys = {**keys, "block_shape": block, "scope_shape": scope, **({"view": view} if view is not None else {})}
    if partial:
        keys["edge"] = "partial"
    return Stage(keys=keys, view=view, block=block, scope=scope, norm=norm, score=score)


def width(tensor, at):
    """Blocks of a full scope."""
    grid = tensor.blocks(at)[1]
    return math.prod(resolve(tensor.stages[at].scope, grid))


def draw_stages(rng, module):
    """One to three stages of a tensor that is coupled to no other."""
    scoring = draw_scoring(rng)
    return [draw_stage(rng, tuple(module.weight.shape), scoring) for _ in range(rng.choice([1, 1, 2, 2, 3]))]


def draw_coupled(rng, scoring):
    """(modules, their stages) that share budgets or are kept and dropped together."""
    kind, rows, count = rng.choice(["whole", "rows", "together"]), rng.choice(SIZES), rng.choice([2, 2, 3])
    partial = rng.random() < 0.5
    modules, stages = [], []
    scope = draw_tile(rng, [rows], partial) if rng.random() < 0.5 else ()
    for number in range(count):
        rank = rng.choice([1, 2, 2, 3, 4])
        shape = tuple(rows if k == 0 and kind != "whole" else rng.choice([1, 2, 3, 4]) for k in range(rank))
        order = None
        if kind == "together" and number and rank > 1 and rng.random() < 0.5:
            shape, order = (shape[1], shape[0], *shape[2:]), (1, 0)
        tile = draw_tile(rng, shape, partial)
        if kind == "whole":
            tall = tuple(n + rng.choice([0, 0, 1]) for n in shape) if partial and rng.random() < 0.5 else ()
            block = tuple(1 for _ in tall) or None
            stage = draw_stage(rng, shape, scoring, block=block, scope=tall, partial=partial)
        elif kind == "rows":
            stage = draw_stage(rng, shape, scoring, block=(1, *tile[1:]), scope=scope[:1] or (1,), partial=partial)
        else:
            block = tuple(1 if k == (order or (0,))[0] else -1 for k in range(rank))
            stage = draw_stage(rng, shape, scoring, block=block, scope=scope, partial=partial)
        if kind == "together":
            stage.together, stage.order = "pair", order
            stage.keys |= {"block_coupling": "pair", **({"coupling_order": order} if order else {})}
        else:
            stage.shares = "all"
            stage.keys["scope_coupling"] = "all"
        modules.append(Raw(strided(rng, shape)))
        stages.append([stage])
    if rng.random() < 0.3:  # one of them has another stage of its own
        at = rng.randrange(count)
        extra = draw_stage(rng, tuple(modules[at].weight.shape), scoring)
        stages[at].append(extra)
    return modules, stages


def draw_case(rng):
    """(model, [Sparse of each tensor], config): one to three tensors, coupled or not."""
    if rng.random() < 0.35:
        modules, stages = draw_coupled(rng, draw_scoring(rng))
    else:
        modules = [draw_module(rng) for _ in range(rng.choice([1, 1, 2]))]
        stages = [draw_stages(rng, m) for m in modules]
    model = nn.ModuleDict({f"m{k}": m for k, m in enumerate(modules)})
    shapes = [tuple(m.weight.shape) for m in modules]
    tensors = [Sparse(f"m{k}.weight", s, list(own)) for k, (s, own) in enumerate(zip(shapes, stages, strict=True))]
    if any(s.shares or s.together for t in tensors for s in t.stages):
        draw_budget(rng, tensors)
    else:
        for tensor in tensors:
            draw_own_budgets(rng, tensor)
            draw_budget(rng, [tensor])
    return model, tensors, [entry_of(t) for t in tensors]


def draw_own_budgets(rng, tensor):
    """Budgets of the stages themselves, of some or all of them."""
    for at, stage in enumerate(tensor.stages) if len(tensor.stages) > 1 else ():
        if rng.random() < 0.6:
            number = rng.randint(0, width(tensor, at))
            stage.budget = rng.choice([("nnz", number), ("level", rng.choice(LEVELS))])
            stage.keys |= {{"nnz": "nnz", "level": "sparsity_level"}[stage.budget[0]]: stage.budget[1]}


def draw_budget(rng, tensors):
    """A level or a count that all tensors share, for their stages without a budget."""
    level, nnz = rng.choice(LEVELS), None
    if rng.random() < 0.4:
        free = [[(t, at) for t in tensors] for at in range(max(len(t.stages) for t in tensors))]
        free = [[(t, at) for t, at in row if at < len(t.stages) and t.stages[at].budget is None] for row in free]
        together = any(t.stages[0].together for t in tensors)
        widths = [min(width(*p) for p in row) if together else sum(width(*p) for p in row) for row in free if row]
        level, nnz = None, rng.randint(0, min(widths, default=0))
    for tensor in tensors:
        tensor.level, tensor.nnz = level, nnz


def entry_of(tensor):
    """The config entry of a tensor."""
    keys = [dict(s.keys) for s in tensor.stages]
    budget = {"sparsity_level": tensor.level} if tensor.level is not None else {"nnz": tensor.nnz}
    has_own = all(s.budget for s in tensor.stages)
    return {"tensor_fqn": tensor.fqn, **({"stages": keys} if len(keys) > 1 else keys[0]), **({} if has_own else budget)}
