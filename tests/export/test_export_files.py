"""Files of sparse models: kept values with bits or gaps, the same bits after loading; damaged and foreign files."""

import contextlib
import json
import random
import struct
import weakref

import pytest
import torch
from export_models import Tied, linear, put, rename, rewritten, same_bits, squashed
from safetensors.torch import save_file
from torch import nn

from sparsekit_ao import SparsityError, export, patterns
from sparsekit_ao.export.encoding import CODES, smaller_code
from sparsekit_ao.export.tensor_file import Stored, file_bytes, write_file

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


def test_views_of_one_memory_that_read_other_values_are_not_tied(tmp_path):
    plain = torch.view_as_complex(torch.eye(64)[..., None] * torch.tensor([1.0, 2.0]))
    state = {"a": plain, "b": plain.conj(), "c": plain.T, "d": plain.imag, "e": plain.conj().imag, "f": plain[:]}
    export.save_sparse(state, tmp_path / "x")
    found = export.load_sparse(tmp_path / "x")
    assert all(torch.equal(found[k], state[k]) for k in state) and found["f"] is found["a"]


def test_a_default_device_does_not_matter(tmp_path):
    model = squashed(linear(), torch.float16)
    again = linear(dtype=torch.float16)
    with torch.device("meta"):
        export.save_sparse(model, tmp_path / "x")
        assert same_bits(export.load_sparse(tmp_path / "x")["0.weight"], model[0].weight)
        export.pack_2_4(model, tmp_path / "x")
        export.load_2_4(again, tmp_path / "x")
    assert same_bits(again[0].weight, model[0].weight)


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
        ({"w": zeros, "__metadata__": zeros}, "'__metadata__' cannot be the name of a tensor"),
        ({"w": zeros, 3: zeros}, "3 cannot be the name of a tensor"),
        ({"w" * 5000: torch.eye(30)}, "no tensor is smaller"),
        ({"w": zeros, "w.gaps": torch.ones(2)}, "'w.gaps' names a tensor and a part of another one"),
    ):
        with pytest.raises(SparsityError, match=text):
            export.save_sparse(state, tmp_path / "x")
    assert not list(tmp_path.iterdir())


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
    (put("aliases", "a", ["w"]), "a is to be the same tensor as .'w'., which the file does not have"),
    (put("aliases", "a", "w.mask"), "a is to be the same tensor as 'w.mask', which the file does not have"),
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
    for call in (export.load_sparse, lambda path: export.save_sparse({"w": torch.zeros(64, 64)}, path)):
        with pytest.raises(IsADirectoryError, match="is a folder; pass the path of a file"):
            call(tmp_path)
    for text in ("[" * 100_000, "9" * 5000, "{"):
        save_file({"w": torch.ones(3)}, tmp_path / "x", {"sparsekit_ao.sparse": text})
        with pytest.raises(SparsityError, match="'sparsekit_ao.sparse' in its metadata is not JSON"):
            export.load_sparse(tmp_path / "x")
