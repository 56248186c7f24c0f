"""Compiled loops are used where their machine code exists or pays; damaged caches; the switch in the environment."""

import logging

import pytest
import torch
from kernel_cases import as_scopes, generator

from sparsekit_ao import ScopeSparsifier, SparsityError
from sparsekit_ao.selection import Update, backend, keep_mask, one_step, scope_masks
from sparsekit_ao.selection.numba import compiling, launch
from sparsekit_ao.selection.numba.compiling import Kind
from sparsekit_ao.sparsifiers import planned

pytest.importorskip("numba")
ROWS = 1 << 16  # of four elements each


@pytest.fixture
def nothing_compiled(monkeypatch):
    """No machine code in memory or on disk, and a compiler that takes no time; kinds that were compiled."""
    compiled = []
    monkeypatch.delenv("SPARSEKIT_AO_NUMBA", raising=False)
    monkeypatch.setattr(compiling, "_ready", set())
    monkeypatch.setattr(compiling, "_absent", set())
    monkeypatch.setattr(compiling, "_chosen", compiling.Counter())
    monkeypatch.setattr(compiling, "_is_on_disk", lambda kind: False)
    monkeypatch.setattr(compiling, "_call_without_work", compiled.append)
    return compiled


def update(rows=ROWS, dtype=torch.float32):
    values = torch.randn(rows, 4, generator=generator()).to(dtype)
    return Update(scopes=(as_scopes(values, torch.ones(rows, 4, dtype=torch.bool), (1, 1), (1, 4)),), keep=2)


def thresholds(monkeypatch, large, pays):
    threads = torch.get_num_threads()
    monkeypatch.setattr(compiling, "LARGE", large // threads)
    monkeypatch.setattr(compiling, "PAYS", pays // threads)


def test_steps_of_less_than_a_second_never_wait_for_the_compiler(nothing_compiled):
    work = update()
    assert [backend.choose(work).name for _ in range(200)] == ["cpu"] * 200
    scope_masks([work])
    assert not nothing_compiled and int(work.members[0].mask.sum()) == 2 * ROWS


def test_large_steps_compile_once_the_plain_path_has_worked_as_long(nothing_compiled, monkeypatch):
    thresholds(monkeypatch, 4 * ROWS, 12 * ROWS)
    work, other = update(), update(dtype=torch.bfloat16)
    assert [backend.choose(work).name for _ in range(5)] == ["cpu", "cpu", "cpu", "numba", "numba"]
    assert backend.choose(other).name == "cpu"  # of another kind
    assert [backend.choose(update(ROWS // 2)).name for _ in range(9)] == ["cpu"] * 9  # below a second


def test_all_calls_of_a_step_count_together(nothing_compiled, monkeypatch):
    thresholds(monkeypatch, 8 * ROWS, 8 * ROWS)
    work = update()
    assert [backend.choose(work).name for _ in range(3)] == ["cpu"] * 3
    with one_step(8 * ROWS):
        assert [backend.choose(work).name for _ in range(3)] == ["cpu", "cpu", "numba"]
    seen = []
    monkeypatch.setattr(planned, "AT_ONCE", 256 * 256)  # a tensor in each call
    monkeypatch.setattr(compiling, "pays", lambda *_: seen.append(compiling.elements_of_step.get()))
    sparsifier = ScopeSparsifier(nnz=2, scope_shape=(1, 4))
    sparsifier.prepare(torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(3))))
    sparsifier.step()
    assert seen == [3 * 256 * 256] * 3 and compiling.elements_of_step.get() == 0


def test_compiling_is_logged_once(nothing_compiled, caplog):
    kind = Kind("lanes", 4, 1)
    with caplog.at_level(logging.WARNING, "sparsekit_ao"):
        compiling.make_ready(kind)
        compiling.make_ready(kind)
    assert nothing_compiled == [kind] and compiling.pays(kind, 1)
    (record,) = caplog.records
    assert record.name == "sparsekit_ao" and "compiling the selection of masks (lanes, 4-byte" in record.getMessage()
    assert "SPARSEKIT_AO_NUMBA=off in the environment prevents it" in record.getMessage()


def test_the_switch(nothing_compiled, monkeypatch):
    work = update()
    for value, name in (("always", "numba"), ("off", "cpu"), ("auto", "cpu")):
        monkeypatch.setenv("SPARSEKIT_AO_NUMBA", value)
        assert backend.choose(work).name == name
    monkeypatch.setenv("SPARSEKIT_AO_NUMBA", "off")
    with pytest.raises(SparsityError, match='impl="numba" cannot take this: SPARSEKIT_AO_NUMBA=off'):
        scope_masks([work], impl="numba")
    monkeypatch.setenv("SPARSEKIT_AO_NUMBA", "0")
    with pytest.raises(SparsityError, match="SPARSEKIT_AO_NUMBA must be one of auto, always, off, got '0'"):
        scope_masks([work])


@pytest.mark.parametrize("shape", [(64, 4), (64, 300), (4, 1 << 19)], ids=["lanes", "rows", "wide"])
def test_what_is_compiled_beforehand_is_what_a_step_calls(shape):
    from sparsekit_ao.selection.numba import lanes, scopes

    functions = (lanes.select_side_by_side, scopes.select_by_one, scopes.sample, scopes.choose, scopes.emit_mask)
    scores = torch.randn(shape, generator=generator())
    kind = launch.kind_of(Update(scopes=(as_scopes(scores, scores > 9, (1, 1), (1, -1)),), keep=2))
    compiling.make_ready(kind)
    before = [len(f.signatures) for f in (*functions, scopes.place)]
    found = keep_mask(scores, shape[1] // 2, magnitude=True, impl="numba")
    assert [len(f.signatures) for f in (*functions, scopes.place)] == before
    assert torch.equal(found, keep_mask(scores, shape[1] // 2, magnitude=True, impl="reference"))


def plus_one(x):
    return x + 1


@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b"", lambda b: b[:-60] + bytes(60)])
def test_damaged_files_are_compiled_again_and_replaced(pattern, damage, tmp_path, monkeypatch, capfd):
    from sparsekit_ao.selection.numba import cache

    monkeypatch.setattr(cache.numba.config, "CACHE_DIR", str(tmp_path))
    assert cache.compiled(plus_one)(1) == 2
    (path,) = tmp_path.rglob(pattern)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(cache.NotCompiled), cache.only_loaded():
        cache.compiled(plus_one)(1)
    assert cache.compiled(plus_one)(1) == 2
    with cache.only_loaded():
        assert cache.compiled(plus_one)(1) == 2
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_cannot_be_written_is_no_error_and_prints_nothing(tmp_path, monkeypatch, capfd):
    from sparsekit_ao.selection.numba import cache

    monkeypatch.setattr(cache.numba.config, "CACHE_DIR", str(tmp_path))
    function = cache.compiled(plus_one)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.caching.IndexDataCacheFile, "_open_for_write", refuse)
    assert function(1) == 2
    with pytest.raises(cache.NotCompiled), cache.only_loaded():
        cache.compiled(plus_one)(1)
    assert capfd.readouterr() == ("", "") and not list(tmp_path.rglob("*.nb?"))
