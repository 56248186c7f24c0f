"""Files of sparse models: packed 2:4 weights, and kept values with bits or gaps; the same bits after loading."""

import contextlib
import json
import random
import struct
import weakref

import pytest
import torch
from export_models import Tied, linear, same_bits, squashed, with_value
from safetensors.torch import load_file, save_file
from torch import nn

from sparsekit_ao import SparsityError, export, patterns
from sparsekit_ao.export.encoding import CODES, smaller_code
from sparsekit_ao.export.tensor_file import Stored, file_bytes, write_file
from sparsekit_ao.export.two_four import _on_cuda

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.complex64, torch.int64, torch.int8, torch.bool]


def state_dict(dtype, level, n=999):
    """A tensor of a dtype with random bits, of which a part is kept; nan, -0.0 and both ends of it among them."""
    torch.manual_seed(0)
    values = torch.randint(1, 2 if dtype == torch.bool else 256, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    values.view(torch.uint8).view(n, -1)[torch.rand(n) < level] = 0
    if dtype.is_floating_point:
        values[[0, n // 2]] = torch.tensor([-0.0, torch.nan]).to(dtype)
    return {"w": values.reshape(3, -1), "step": torch.tensor(3), "empty": torch.ones(0, 2)}


@pytest.mark.parametrize("level", [0.5, 0.97, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_the_same_after_loading(dtype, level, tmp_path):
    state = state_dict(dtype, level, 3000)
    report = export.save_sparse(state, tmp_path / "x")
    found = export.load_sparse(tmp_path / "x")
    assert found.keys() == state.keys() and all(same_bits(found[k], state[k]) for k in state)
    assert report.converted == ("w",) and report.after == (tmp_path / "x").stat().st_size < report.before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x"]


@pytest.mark.parametrize("code", CODES)
def test_codes_restore_every_position(code):
    encode, decode = CODES[code]
    torch.manual_seed(0)
    for n in (0, 1, 7, 8, 254, 255, 256, 510, 511, 1000):
        for kept in (torch.zeros(n).bool(), torch.ones(n).bool(), torch.arange(n) == n - 1, torch.rand(n) < 0.01):
            bytes_ = encode(kept)
            assert torch.equal(decode(bytes_, n), kept.nonzero().squeeze(1))
            assert smaller_code(kept)[1] <= len(bytes_)


def test_sizes_of_a_layer(tmp_path):
    torch.manual_seed(0)
    for dtype, level, bound in ((torch.float32, 0.9, 0.131), (torch.bfloat16, 0.9, 0.163), (torch.int8, 0.5, 0.626)):
        weight = torch.randn(256, 512).mul(40).to(dtype)
        weight[torch.rand(256, 512) < level] = 0
        density = float((weight != 0).float().mean())
        report = export.save_sparse({"w": weight}, tmp_path / "x")
        assert report.after <= (density + 1 / (8 * dtype.itemsize) + 0.01) * report.before
        assert report.after <= (bound + 0.01) * report.before
        assert not report.notes or dtype == torch.bfloat16
    weight = torch.randint(-3, 4, (256, 512), dtype=torch.int8)  # few levels, which zlib codes in few bits
    assert "zlib would leave about 0.4" in export.save_sparse({"w": weight}, tmp_path / "x").notes[0]


def test_tied_tensors_are_stored_once_and_other_layouts_are_kept(tmp_path):
    model = Tied(64, 64)
    with torch.no_grad():
        model.a.weight[:, ::2] = 0
    export.save_sparse(model, tmp_path / "x")
    state = export.load_sparse(tmp_path / "x")
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    again = Tied(64, 64)
    again.load_state_dict(state)
    assert torch.equal(again.a.weight, model.a.weight)
    conv = squashed(nn.Sequential(nn.Conv2d(16, 16, 3)), pattern=patterns.n_m(1, 4)).to(
        memory_format=torch.channels_last
    )
    export.save_sparse(conv, tmp_path / "x")
    assert same_bits(export.load_sparse(tmp_path / "x")["0.weight"], conv[0].weight)


def test_no_more_than_one_tensor_is_made_at_a_time(tmp_path):
    made = []

    def make():
        assert all(earlier() is None for earlier in made)
        tensor = torch.ones(3, 2)
        made.append(weakref.ref(tensor))
        return tensor

    stored = [Stored(name=str(k), dtype=torch.float32, shape=(3, 2), make=make) for k in range(5)]
    assert write_file(tmp_path / "x", stored, {}) == file_bytes(stored, {}) == (tmp_path / "x").stat().st_size
    assert len(made) == 5


def test_a_file_is_replaced_only_by_a_complete_one(tmp_path):
    def fail():
        raise RuntimeError("out of memory")

    (tmp_path / "x").write_text("before")
    with pytest.raises(RuntimeError, match="out of memory"):
        write_file(tmp_path / "x", [Stored(name="w", dtype=torch.float32, shape=(1,), make=fail)], {})
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "before")]


def test_what_cannot_be_saved(tmp_path):
    zeros = torch.zeros(64, 64)
    for state, text in (
        ({"w": torch.ones(64, 64)}, r"no tensor is smaller without its zeros. .*: 0 of 4,096 elements are zero in w"),
        ({}, "no tensor is smaller"),
        ({"w": zeros, "extra": 3}, "extra: only tensors with values can be saved, got int"),
        ({"w": zeros, "m": torch.ones(2, device="meta")}, "m: only tensors with values"),
        ({"w": zeros.to_sparse()}, "torch.sparse_coo cannot be saved"),
        ({"w": zeros, "w.gaps": torch.ones(2)}, "'w.gaps' names a tensor and a part of another one"),
    ):
        with pytest.raises(SparsityError, match=text):
            export.save_sparse(state, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def rewritten(path, change):
    """The file with another header, whose `__metadata__` entry is changed as data."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    key = next(k for k in header["__metadata__"] if k.startswith("sparsekit_ao"))
    about = json.loads(header["__metadata__"][key])
    header["__metadata__"][key] = json.dumps(change(about, header) or about)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def put(*path):
    """A change of one entry: keys, then the value."""

    def change(about, header):
        for key in path[:-2]:
            about = about[key]
        about[path[-2]] = path[-1]

    return change


def rename(old, new):
    def change(about, header):
        header[new] = header.pop(old)

    return change


FOREIGN = [
    (put("tensors", "w", "shape", [10**6, 10**6]), "a mask of shape .375. does not fit"),
    (put("tensors", "w", "shape", [3, -1000]), "needs a shape, a code of .* and a count of kept values"),
    (put("tensors", "w", "shape", "1"), "needs a shape"),
    (put("tensors", "w", "shape", [0, 2**40, 2**40]), "needs a shape"),
    (put("tensors", "w", "code", ["mask"]), "needs a shape"),
    (put("tensors", "w", "kept", 7), "w: 7 values of 3000 elements are to be stored, got shape"),
    (put("tensors", "w", "kept", True), "needs a shape"),
    (put("tensors", "w", "code", "zip"), r"needs a shape, a code of \['mask', 'gaps'\]"),
    (put("tensors", "w", "code", "gaps"), "the file has no w.gaps"),
    (put("tensors", "v", {"shape": [1], "code": "mask", "kept": 1}), "v: the file has no v.mask"),
    (put("tensors", 3), "must hold 'tensors' and 'aliases', got"),
    (put("aliases", "a", "b"), "a is to be the same tensor as 'b', which the file does not have"),
    (put("aliases", "step", "w"), "step is stored, and is to be the same tensor as 'w'"),
    (lambda about, header: [1], "must hold 'tensors' and 'aliases'"),
    (rename("w.mask", "w.bits"), "the file has no w.mask"),
    (rename("step", "w"), "w: is stored dense as well"),
]


@pytest.mark.parametrize(("change", "text"), FOREIGN, ids=range(len(FOREIGN)))
def test_files_that_contradict_themselves(change, text, tmp_path):
    export.save_sparse(state_dict(torch.float32, 0.5, 3000), tmp_path / "x")
    rewritten(tmp_path / "x", change)
    with pytest.raises(SparsityError, match=text):
        export.load_sparse(tmp_path / "x")


@pytest.mark.parametrize("level", [0.5, 0.97])
def test_a_code_that_places_other_elements(level, tmp_path):
    export.save_sparse(state_dict(torch.float32, level, 3000), tmp_path / "x")
    data = bytearray((tmp_path / "x").read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    name = next(n for n in header if n in ("w.mask", "w.gaps"))
    start = 8 + size + header[name]["data_offsets"][0]
    data[start] = data[start] ^ 1 if name == "w.mask" else 255
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(SparsityError, match=r"w: its (mask|gaps) must place \d+ values in 3000 elements, got"):
        export.load_sparse(tmp_path / "x")


def test_damaged_files_are_loaded_or_refused(tmp_path):
    path, random_ = tmp_path / "x", random.Random(0)
    for level in (0.5, 0.97, None):
        if level is None:
            export.pack_2_4(squashed(linear(), torch.float16), path)
        else:
            export.save_sparse(state_dict(torch.float32, level, 3000), path)
        data = path.read_bytes()
        for _ in range(100):
            damaged = bytearray(data[: random_.choice((len(data), random_.randrange(len(data))))])
            for _ in range(2):
                damaged[random_.randrange(len(damaged))] ^= 1 << random_.randrange(8)
            path.write_bytes(damaged)
            with contextlib.suppress(SparsityError):
                export.load_sparse(path) if level else export.load_2_4(linear(dtype=torch.float16), path)


def test_files_of_others(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "x")
    with pytest.raises(SparsityError, match="was not written by save_sparse"):
        export.load_sparse(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"\xff" * 64)
    with pytest.raises(SparsityError, match="not a complete safetensors file"):
        export.load_sparse(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        export.load_sparse(tmp_path / "y")


@pytest.mark.parametrize(("dtype", "share"), [(torch.float16, 0.5625), (torch.bfloat16, 0.5625), (torch.int8, 0.625)])
def test_packed_weights_are_the_same_after_loading(dtype, share, tmp_path):
    model = squashed(linear(64, 256), dtype)
    with torch.no_grad():
        model[0].weight[5, 4:8] = 0  # fewer than two of four
    export.pack_2_4(model, tmp_path / "x")
    again = linear(64, 256)
    again[0].weight = nn.Parameter(torch.ones_like(model[0].weight), requires_grad=False)
    export.load_2_4(again, tmp_path / "x")
    assert same_bits(again[0].weight, model[0].weight)
    assert sum(part.nbytes for part in load_file(tmp_path / "x").values()) == share * model[0].weight.nbytes


def test_negative_zeros_are_zeros_when_packed(tmp_path):
    model = with_value(squashed(linear(), torch.float16), -0.0, at=linear()[0].weight > 9)
    with torch.no_grad():
        model[0].weight[model[0].weight == 0] = -0.0
    export.pack_2_4(model, tmp_path / "x")
    again = linear(dtype=torch.float16)
    export.load_2_4(again, tmp_path / "x")
    assert torch.equal(again[0].weight, model[0].weight) and not again[0].weight[model[0].weight == 0].signbit().any()


def mixed():
    """A packed layer, a dense one, a bias, a buffer, and a weight that two others share."""
    model = nn.ModuleDict({"tied": Tied(8, 8), "norm": nn.BatchNorm1d(4), "fc": squashed(linear(), torch.float16)})
    with torch.no_grad():
        model["tied"].a.weight.normal_()
    return model


def test_everything_else_is_loaded_too(tmp_path):
    model = mixed()
    export.pack_2_4(model, tmp_path / "x")
    again = mixed()
    export.load_2_4(again, tmp_path / "x")
    assert all(same_bits(v, model.state_dict()[k]) for k, v in again.state_dict().items())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: nn.Sequential(linear()), "0.weight is packed, but no weight of the model that pack_2_4 could pack"),
        (lambda: linear(64, 64, dtype=torch.float16), r"0.weight.values must be torch.float16 of shape \(64, 32\) for"),
        (lambda: linear(dtype=torch.bfloat16), r"must be torch.bfloat16 of shape \(32, 32\) for this model, got F16"),
        (lambda: linear(), "0.weight is packed, but no weight"),
        (lambda: nn.Sequential(*linear(dtype=torch.float16), nn.Linear(2, 2)), "has no tensor '1.bias'"),
    ],
    ids=range(5),
)
def test_models_that_a_packed_file_does_not_fit(make, text, tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    model = make()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(SparsityError, match=text):
        export.load_2_4(model, tmp_path / "x")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_packed_file_needs_a_model_with_values(tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    with pytest.raises(SparsityError, match="load_2_4: the model is on the meta device; model.to_empty"):
        export.load_2_4(linear(dtype=torch.float16, device="meta"), tmp_path / "x")


PACKED = [
    (put("packed", ["1.weight"]), "1.weight is packed, but no weight"),
    (put("packed", 3), "must hold 'packed' and 'aliases'"),
    (put("aliases", "0.weight", "0.weight"), "is the same tensor as itself"),
    (put("aliases", "a", "0.weight"), "a is to be the same tensor as 0.weight, but they differ in the model"),
    (rename("0.weight.metadata", "m"), "has no tensor '0.weight.metadata'"),
]


@pytest.mark.parametrize(("change", "text"), PACKED, ids=range(len(PACKED)))
def test_packed_files_that_contradict_themselves(change, text, tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    rewritten(tmp_path / "x", change)
    with pytest.raises(SparsityError, match=text):
        export.load_2_4(linear(dtype=torch.float16), tmp_path / "x")


def test_metadata_that_are_not_2_4(tmp_path):
    export.pack_2_4(squashed(linear(), torch.float16), tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    (tmp_path / "x").write_bytes(data[:-2] + b"\0\0")  # both values of a group at its first place
    with pytest.raises(SparsityError, match="0.weight: its metadata are not those of a 2:4 weight"):
        export.load_2_4(linear(dtype=torch.float16), tmp_path / "x")


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_the_tensor_of_cutlass_holds_the_file_s_values_and_metadata(monkeypatch, tmp_path):
    model = squashed(linear(), torch.float16)
    export.pack_2_4(model, tmp_path / "x")
    parts = [load_file(tmp_path / "x")[f"0.weight.{part}"] for part in ("values", "metadata")]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = _on_cuda(model[0].weight, model[0].weight, *parts)
    assert isinstance(found, torch.sparse.SparseSemiStructuredTensorCUTLASS) and found.shape == model[0].weight.shape
    assert torch.equal(found.packed, parts[0]) and torch.equal(found.meta, parts[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loaded_on_a_gpu_weights_are_semi_structured(dtype, tmp_path):
    model = squashed(linear(128, 256), dtype)
    export.pack_2_4(model, tmp_path / "x")
    sparse = linear(128, 256, dtype=dtype).cuda()
    export.load_2_4(sparse, tmp_path / "x")
    assert isinstance(sparse[0].weight, torch.sparse.SparseSemiStructuredTensor)
    x = torch.randn(64, 256).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(sparse(x.cuda()).cpu().float(), model.float()(x.float()), rtol=2e-2, atol=2e-2)
