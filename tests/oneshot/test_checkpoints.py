"""Which calls a checkpoint continues, and files that are damaged or of something else."""

import collections
import contextlib
import copy
import dataclasses
import functools
import re
import threading
import types
import weakref

import numpy as np
import pytest
import torch
import transformers
from grids import grid
from networks import Net
from stock import same
from torch import nn
from torch.nn import functional as F

from sparsekit_ao import ScopeSparsifier, SparsityError, one_shot, prune, scores
from sparsekit_ao.oneshot import walk

FACTOR = 1.0
DATA = "other batches, forward or token_mask"


class Power:
    """A score of one's own."""

    def __init__(self, power):
        self.power = power

    def __call__(self, weight, name):
        return weight.abs().pow(self.power)


class NegativePower(Power):
    def __call__(self, weight, name):
        return -super().__call__(weight, name)


@dataclasses.dataclass
class Rows:
    """A batch of one's own, which no rule of pytree knows."""

    x: torch.Tensor
    scale: float = 1.0


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


def with_factor(factor):
    return lambda weight, name: weight.abs() * factor


def through_a_global(factor):
    """A function whose global variable FACTOR has this value, as in another version of a script."""
    return types.FunctionType((lambda w, n: w.abs() * FACTOR).__code__, {**globals(), "FACTOR": factor})


def through_a_helper(sign):
    space = {"helper": types.FunctionType((lambda w: w).__code__ if sign else (lambda w: -w).__code__, {})}
    return types.FunctionType((lambda w, n: helper(w.abs())).__code__, space)  # noqa: F821


def through_a_package(factor):
    """A function that reads a variable of a module in a package of one's own."""
    outer, inner = types.ModuleType("package_of_ones_own"), types.ModuleType("package_of_ones_own.settings")
    outer.settings, inner.FACTOR = inner, factor
    return types.FunctionType((lambda w, n: w.abs() * package.settings.FACTOR).__code__, {"package": outer})  # noqa: F821


def hooked(module, factor):
    module.register_forward_hook(lambda m, inputs, output: output * factor)
    return module


class Magnitude(nn.Module):
    """A score of one's own that is a module."""

    def forward(self, weight, name):
        return weight.abs()


def with_default(factor):
    return lambda weight, name, factor=factor: weight.abs() * factor


def net(activation=F.relu, eps=1e-5, scale=1.0, buffer=1.0):
    torch.manual_seed(0)
    parts = {"a": nn.Linear(8, 16), "norm": nn.LayerNorm(16, eps=eps), "b": nn.Linear(16, 4), "activation": activation}
    return Net(
        lambda m, x: m.b(m.activation(m.norm(m.a(x)))) * scale * m.buffer,
        **parts,
        buffer=nn.Buffer(torch.tensor(buffer)),
    )


def changed(model):
    with torch.no_grad():
        model.a.weight[5, 3] += 1e-3
    return model


def rows(seed=0):
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))


def called(folder, model=net, **keys):
    options = {"batches": [rows()], "compensate": None, "progress": False, "checkpoint": folder, **keys}
    return prune(model(), 0.5, **options)[0].state_dict()


def by_power(power):
    return functools.partial(lambda weight, name, power: weight.abs().pow(power), power=power)


SCORES = {
    "code": (lambda: lambda w, n: w.abs(), lambda: lambda w, n: -w.abs()),
    "constant": (lambda: lambda w, n: (w - 0.1).abs(), lambda: lambda w, n: (w - 0.2).abs()),
    "method": (lambda: lambda w, n: w.abs().sqrt(), lambda: lambda w, n: w.abs().neg()),
    "nested": (lambda: lambda w, n: sum(v.abs() for v in (w,)), lambda: lambda w, n: sum(-v.abs() for v in (w,))),
    "closure": (lambda: with_factor(1.0), lambda: with_factor(-1.0)),
    "default": (lambda: with_default(1.0), lambda: with_default(-1.0)),
    "tensor": (lambda: with_factor(torch.ones(())), lambda: with_factor(-torch.ones(()))),
    "array": (lambda: with_factor(np.float32(1)), lambda: with_factor(np.float32(-1))),
    "global": (lambda: through_a_global(1.0), lambda: through_a_global(-1.0)),
    "helper": (lambda: through_a_helper(True), lambda: through_a_helper(False)),
    "package": (lambda: through_a_package(1.0), lambda: through_a_package(-1.0)),
    "hook": (lambda: hooked(Magnitude(), 1.0), lambda: hooked(Magnitude(), -1.0)),
    "attribute": (lambda: Power(1.0), lambda: Power(-1.0)),
    "class": (lambda: Power(1.0), lambda: NegativePower(1.0)),
    "partial": (lambda: by_power(1.0), lambda: by_power(-1.0)),
    "bound": (lambda: Power(1.0).__call__, lambda: Power(-1.0).__call__),
    "built in": (lambda: scores.random(seed=0), lambda: scores.random(seed=1)),
    "decorated": (lambda: torch.no_grad()(with_factor(1.0)), lambda: torch.no_grad()(with_factor(-1.0))),
}


@pytest.mark.parametrize("how", SCORES)
def test_another_score_is_another_call_and_an_equal_one_is_the_same(how, tmp_path):
    first, other = SCORES[how]
    expected = called(tmp_path, score=first())
    assert same(called(tmp_path, score=first()), expected)
    with pytest.raises(SparsityError, match="was written by a call with other arguments; to continue"):
        called(tmp_path, score=other())


FORWARDS = {
    "constant": (lambda: lambda m, b: m(b * 2.0), lambda: lambda m, b: m(b * 3.0)),
    "activation": (lambda: lambda m, b: m(b.relu()), lambda: lambda m, b: m(b.tanh())),
    "closure": (lambda f=F.relu: lambda m, b: m(f(b)), lambda f=F.gelu: lambda m, b: m(f(b))),
    "epsilon": (lambda: lambda m, b: m(F.normalize(b, eps=1e-5)), lambda: lambda m, b: m(F.normalize(b, eps=1.0))),
    "partial": (
        lambda: functools.partial(lambda m, b, k: m(b * k), k=1),
        lambda: functools.partial(lambda m, b, k: m(b * k), k=2),
    ),
    "in its class": (lambda: lambda m, b: m(Rows(b).x), lambda: lambda m, b: m(Slots(b).x)),
    "token mask": (lambda: lambda m, b: m(b), lambda: lambda m, b: m(b)),
}


@pytest.mark.parametrize("how", FORWARDS)
def test_another_forward_or_token_mask_is_another_call(how, tmp_path):
    first, other = FORWARDS[how]
    mask, changes = torch.arange(64) % 2 > 0, how == "token mask"
    expected = called(tmp_path, forward=first())
    assert same(called(tmp_path, forward=first(), stream_memory=0), expected)
    with pytest.raises(SparsityError, match=f"was written by a call with {DATA}; to continue"):
        called(tmp_path, forward=other(), **({"token_mask": lambda b: mask} if changes else {}))


@pytest.mark.parametrize(
    ("keys", "what"), [({"compensate": "admm"}, ""), ({"recover": True}, ""), ({}, "another model and ")]
)
def test_other_arguments_are_another_call(keys, what, tmp_path):
    called(tmp_path)
    model = (lambda: net(scale=2.0)) if what else net
    with pytest.raises(SparsityError, match=f"was written by a call with {what}other arguments; to continue"):
        called(tmp_path, model, **(keys or {"compensate": "admm"}))


@pytest.mark.parametrize(
    "other",
    [
        lambda: net(activation=F.gelu),
        lambda: net(activation=functools.partial(F.leaky_relu, negative_slope=0.3)),
        lambda: net(activation=nn.Tanh()),
        lambda: net(eps=1e-3),
        lambda: net(scale=2.0),
        lambda: net(buffer=2.0),
        lambda: changed(net()),
        lambda: hooked(net(), 2.0),
    ],
)
def test_another_model_of_the_same_shapes_is_another_call(other, tmp_path):
    called(tmp_path)
    with pytest.raises(SparsityError, match="was written by a call with another model; to continue"):
        called(tmp_path, other)


class Kept(nn.Linear):
    """A Linear that keeps its last input, which pickling leaves out."""

    def forward(self, x):
        self.last = x
        return super().forward(x)

    def __getstate__(self):
        return {key: value for key, value in super().__getstate__().items() if key != "last"}


class KeptByHand(nn.Linear):
    """The same, with a way of its own to be copied."""

    def forward(self, x):
        self.last = [x, {"mean": x.mean()}]
        return super().forward(x)

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update({key: copy.deepcopy(v, memo) for key, v in vars(self).items() if key != "last"})
        return copied


class MadeAnew(nn.Module):
    """A module that makes its copy as it was made itself, which draws random numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        copied = MadeAnew()
        copied.load_state_dict(self.state_dict())
        return copied


def of_layers(kind):
    torch.manual_seed(0)
    return nn.Sequential(kind(8, 16), nn.ReLU(), kind(16, 4)).eval()


def llama():
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(12).view(2, 6)
USES = {  # {what: (the model, a batch, what one of two processes has done with the model before the call)}
    "a forward of masks": (lambda: of_layers(nn.Linear), rows(), lambda m: m(rows())),
    "a forward under autocast": (
        lambda: of_layers(nn.Linear),
        rows(),
        lambda m: torch.autocast("cpu", torch.bfloat16)(m)(rows()),
    ),
    "a cache that pickling leaves out": (lambda: of_layers(Kept), rows(), lambda m: m(rows())),
    "a cache that copying leaves out": (lambda: of_layers(KeptByHand), rows(), lambda m: m(rows())),
    "compiled": (lambda: of_layers(nn.Linear), rows(), lambda m: m[0].compile(backend="eager")),
    "compiled as a whole": (lambda: of_layers(nn.Linear), rows(), lambda m: m.compile(backend="eager")),
    "hidden states": (llama, {"input_ids": IDS}, lambda m: m(IDS, output_hidden_states=True)),
}


@pytest.mark.parametrize(("what", "masked", "is_used_first"), grid(USES, [True, False], [True, False]))
def test_what_a_copy_of_a_model_leaves_out_is_no_part_of_it(what, masked, is_used_first, tmp_path):
    make, batch, use = USES[what]
    states = []
    for is_used in (is_used_first, not is_used_first):
        torch.manual_seed(0)
        model, sparsifier = make(), ScopeSparsifier(0.5, score="wanda")
        if masked:
            sparsifier.prepare(model)
        if is_used:
            with torch.no_grad():
                use(model)
        if masked:
            one_shot(sparsifier, [batch], compensate=None, checkpoint=tmp_path, progress=False)
        else:
            prune(model, 0.5, batches=[batch], compensate=None, checkpoint=tmp_path, inplace=True, progress=False)
        states.append(model.state_dict())
    assert same(*states)


def test_a_model_that_draws_numbers_when_it_is_copied_leaves_the_generators_alone(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), MadeAnew(), nn.Linear(16, 4))

    model, state = make(), torch.get_rng_state()
    expected = called(tmp_path, lambda: model, inplace=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(called(tmp_path, make, inplace=True), expected)


@contextlib.contextmanager
def a_setting(get, set_to, value):
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def precision(value):
    backend = torch.backends.mkldnn.matmul
    return a_setting(lambda: backend.fp32_precision, lambda v: setattr(backend, "fp32_precision", v), value)


SETTINGS = {  # {a name: (another setting than the usual one, what the error names)}
    "bfloat16": (lambda: torch.autocast("cpu", torch.bfloat16), "another setting of autocast"),
    "float16": (lambda: torch.autocast("cpu", torch.float16), "another setting of autocast"),
    "of a GPU": (
        lambda: a_setting(
            lambda: torch.is_autocast_enabled("cuda"), lambda v: torch.set_autocast_enabled("cuda", v), True
        ),
        "another setting of autocast",
    ),
    "default dtype": (
        lambda: a_setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "another default dtype",
    ),
    "deterministic": (
        lambda: a_setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        "another setting of deterministic algorithms",
    ),
    "matmul": (lambda: precision("bf16"), "another precision of float32"),
    "medium": (
        lambda: a_setting(lambda: "highest", torch.set_float32_matmul_precision, "medium"),
        "another precision of float32",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_of_the_process_is_another_call(name, tmp_path):
    setting, what = SETTINGS[name]
    usual, batch = net(), rows()  # made before the setting

    def called(folder):
        return prune(usual, 0.5, batches=[batch], compensate=None, progress=False, checkpoint=folder)[0].state_dict()

    expected = called(tmp_path / "usual")
    with setting():
        with pytest.raises(SparsityError, match=f"was written by a call with {what}; to continue .* same settings"):
            called(tmp_path / "usual")
        other = called(tmp_path / "other")
        assert same(called(tmp_path / "other"), other)  # the advice: the same call under the same settings
    assert same(called(tmp_path / "usual"), expected)
    with pytest.raises(SparsityError, match=f"was written by a call with {what}; to continue"):
        called(tmp_path / "other")


def test_settings_that_are_named_but_not_changed_are_the_same_call(tmp_path):
    expected = called(tmp_path)
    with torch.autocast("cpu", torch.float16, enabled=False), torch.autocast("cuda", enabled=False):
        assert same(called(tmp_path), expected)


@pytest.mark.parametrize(
    "make",
    [
        Rows,
        Slots,
        lambda x: Rows(x, float(x[0, 0])),
        lambda x: types.SimpleNamespace(x=x.numpy()),
        lambda x: types.SimpleNamespace(x=np.flip(x.numpy(), 0)),
        lambda x: Rows({"x": x}["x"].to_sparse().to_dense()),
        lambda x: Slots(x.to_sparse()),
        lambda x: types.SimpleNamespace(x=x, y=collections.defaultdict(lambda: x)),
        lambda x: types.SimpleNamespace(x=x, y=copy.deepcopy(Rows(x))),  # copying adds __slotnames__ to the class
    ],
)
def test_batches_of_a_class_of_ones_own(make, tmp_path):
    def forward(m, b):
        x = torch.as_tensor(b.x)
        return m(x.to_dense() if x.is_sparse else x)

    expected = called(tmp_path, batches=[make(rows())], forward=forward)
    assert same(called(tmp_path, batches=[make(rows())], forward=forward), expected)
    with pytest.raises(SparsityError, match=f"was written by a call with {DATA}; to continue"):
        called(tmp_path, batches=[make(rows(1))], forward=forward)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *((where, value) for where in ("score", "forward") for value in (threading.Lock(), (x for x in "ab"))),
        ("batches", weakref.ref(Power)),
    ],
)
def test_what_cannot_be_told_from_others_is_refused(where, value, tmp_path):
    keys = {
        "score": {"score": lambda w, n: w.abs() if value else w},
        "forward": {"forward": lambda m, b: m(b) if value else None},
        "batches": {"batches": [Rows(rows(), value)], "forward": lambda m, b: m(b.x)},
    }[where]
    called(None, **keys)
    model = net()
    with pytest.raises(SparsityError, match=rf"uses a {type(value).__name__}, whose values cannot be read \(.*leave"):
        called(tmp_path, lambda: model, inplace=True, **keys)
    assert same(model.state_dict(), net().state_dict()) and not any(tmp_path.iterdir())
    model.unreadable = value  # of a model, it counts by its class
    called(tmp_path, lambda: model, inplace=True)


def test_a_flipped_bit_is_found(tmp_path):
    expected = called(tmp_path)
    path = tmp_path / "00000.pt"
    whole, count = path.read_bytes(), 0
    for at in range(11, len(whole), len(whole) // 20):
        path.write_bytes(bytes([*whole[:at], whole[at] ^ 64, *whole[at + 1 :]]))
        try:
            assert same(called(tmp_path), expected)  # the bit is in a part that is not read
        except SparsityError as error:
            count += "00000.pt' of the checkpoint cannot be read" in str(error)
    assert count > 10
    path.write_bytes(whole)
    assert same(called(tmp_path), expected)


OTHERS = [{}, [1], 3, torch.ones(2), {"was": "x", "weights": {}, "masks": {}, "solved": [], "matched": None}, "other"]


@pytest.mark.parametrize("content", [*OTHERS, slice(0), slice(100), slice(1000)], ids=str)
def test_a_file_of_something_else_or_a_part_of_one_is_named(content, tmp_path):
    expected, path = called(tmp_path), tmp_path / "00001.pt"
    if isinstance(content, slice):
        path.write_bytes(path.read_bytes()[content])
    else:
        if content == "other":  # weights that the call did not save
            content = torch.load(path)
            next(iter(content["weights"].values())).data.view(-1)[0] += 1
        torch.save(content, path)
    with pytest.raises(SparsityError, match=r"00001.pt' of the checkpoint cannot be read .* delete it"):
        called(tmp_path)
    path.unlink()
    assert same(called(tmp_path), expected)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"a\nb\nc", b"\n\n", "é\n\n".encode("latin1")])
def test_a_file_of_the_call_that_is_no_such_file(content, tmp_path):
    (tmp_path / "call.txt").write_bytes(content)
    with pytest.raises(SparsityError, match=r"written by a call with another version, or its call.txt is damaged"):
        called(tmp_path)


@pytest.mark.parametrize("folder", ["", "a\0b", "\udfff", "x" * 5000])
def test_names_that_are_no_folders(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SparsityError, match="must be a folder, or None, got ''|is not a folder that can be written"):
        called(folder)
    assert not any(tmp_path.iterdir())


def test_two_processes_may_share_a_folder(tmp_path, monkeypatch):
    """What the other one does between writing a file and giving it its name does not matter."""
    expected, save, running = called(tmp_path / "alone"), torch.save, []

    def interrupting(state, path):
        save(state, path)
        if not running:
            running.append(None)
            assert same(called(tmp_path / "both"), expected)

    monkeypatch.setattr(walk.torch, "save", interrupting)
    assert same(called(tmp_path / "both"), expected) and running
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"call.txt", "00000.pt", "00001.pt"}


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(state, path):
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    called(tmp_path / "before")
    monkeypatch.setattr(walk.torch, "save", full)
    text = re.escape(str(tmp_path / "new" / "00000.pt"))
    with pytest.raises(SparsityError, match=rf"a finished step cannot be saved as '{text}'.*whether the disk is full"):
        called(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["call.txt"]
