"""The site: pictures and the gallery are made, errors on it are raised somewhere, every public name has an example."""

import ast
import inspect
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import types

import gallery
import pictures
import pytest
import torch
import tutorial_pages

import sparsekit_ao
from sparsekit_ao import oneshot, plot, sparsifiers

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDERS = [getattr(sparsekit_ao, name) for name in sparsekit_ao.__all__]
PUBLIC = (sparsekit_ao, oneshot, plot, sparsifiers, *(m for m in FOLDERS if isinstance(m, types.ModuleType)))
NAMES = {f"{m.__name__}.{name}": getattr(m, name) for m in PUBLIC for name in m.__all__}
DOCUMENTED = {n: found for n, found in NAMES.items() if isinstance(found, (type, types.FunctionType, types.ModuleType))}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_public_name_has_an_example(name):
    found = DOCUMENTED[name]
    if isinstance(found, types.ModuleType):
        assert inspect.getdoc(found)
        return
    members = [m for m in vars(found).values() if callable(m)] if isinstance(found, type) else []
    assert any(">>> " in (inspect.getdoc(one) or "") for one in (found, *members))


def test_the_reference_has_every_public_name():
    text = "\n".join(path.read_text() for path in (ROOT / "docs/api").glob("*.md"))
    found = [pkgutil.resolve_name(name) for name in re.findall(r"auto(?:class|function):: (\S+)", text)]
    for name in re.findall(r"automodule:: (\S+)\n   :members:", text):
        if "integrations" not in name:
            module = pkgutil.resolve_name(name)
            found += [getattr(module, own) for own in getattr(module, "__all__", vars(module))]
    known = {id(one) for one in found}
    classes_and_functions = {n: one for n, one in DOCUMENTED.items() if not isinstance(one, types.ModuleType)}
    assert not [name for name, one in classes_and_functions.items() if id(one) not in known]


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_every_notation_of_the_gallery_gives_the_same_mask(entry):
    mask, scope, block = gallery.evaluate(entry)
    assert mask.shape == scope.shape == block.shape and 0 < mask.float().mean() < 1
    assert bool((scope >= block).all()) and int(block.sum()) > 0


def test_the_pictures_of_the_readme_are_what_the_script_draws(tmp_path):
    assert pictures.README_PICTURE.read_text() == pictures.overview()
    pictures.write_plot("models", tmp_path / "models.svg")
    committed, drawn = (
        re.findall("<text.*?>(.*?)</text>", path.read_text())
        for path in (pictures.README_PLOT, tmp_path / "models.svg")
    )
    assert committed == drawn and len(committed) > 10


def test_drawings_are_small_svg_files():
    for name, draw in pictures.DRAWINGS.items():
        assert draw().startswith("<svg") and len(draw()) < 50_000, name


def test_plots_read_the_csvs(tmp_path):
    for name in pictures.PLOTS:
        pictures.write_plot(name, tmp_path / f"{name}.svg")
        assert 1000 < (tmp_path / f"{name}.svg").stat().st_size < 50_000


def test_every_picture_of_a_page_is_written_once(tmp_path, monkeypatch):
    gallery.write(tmp_path)
    drawn = {path.stem for path in tmp_path.glob("*.svg")}
    others = {*pictures.DRAWINGS, *pictures.PLOTS}
    on_pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert not drawn & others and {*re.findall(r"_generated/(\w+)\.svg", on_pages)} == others
    monkeypatch.setitem(pictures.PLOTS, "diagonals", pictures.PLOTS["digits"])
    with pytest.raises(ValueError, match="two pictures are called diagonals.svg"):
        gallery.write(tmp_path)


@pytest.mark.parametrize("path", sorted(tutorial_pages.SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_every_tutorial_has_the_output_of_its_cells(path):
    text = tutorial_pages.page(path.stem)
    assert text.startswith("# ") and "Output:" in text


def test_dir_of_the_package_shows_its_public_names():
    assert set(dir(sparsekit_ao)) == {*sparsekit_ao.__all__, "__version__"}


def texts_of(path):
    """The texts of a file, with … for each value that is put in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_errors_that_are_explained_are_those_of_the_library():
    texts = (text for path in (ROOT / "sparsekit_ao").rglob("*.py") for text in texts_of(path))
    known = {line for text in texts for line in text.splitlines()}
    explained = re.findall(r"^`(.+)`$", (ROOT / "docs/errors.md").read_text(), flags=re.MULTILINE)
    assert len(explained) > 20
    for message in explained:
        parts = [part for part in message.split("…") if part]
        pattern = ".*".join(map(re.escape, parts))
        assert any(re.search(pattern, line) for line in known if parts[0] in line), message


def test_the_function_of_the_page_calls_lm_eval(monkeypatch):
    """With a stub of its interface."""
    page, names = (ROOT / "docs/one_shot.md").read_text(), {"tokenizer": "the tokenizer"}
    exec(re.search(r"```python\n(def evaluate\(.*?)```", page, re.DOTALL)[1], names)
    stub, huggingface = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.models.huggingface")
    stub.models = types.ModuleType("lm_eval.models")
    stub.models.huggingface = huggingface
    huggingface.HFLM = lambda *, pretrained, tokenizer: (pretrained, tokenizer)

    def simple_evaluate(*, model, tasks, limit):
        assert model == ("the model", "the tokenizer")
        return {"results": {task: {"alias": task, "acc,none": 0.5, "acc_stderr,none": 0.1} for task in tasks}}

    stub.simple_evaluate = simple_evaluate
    for module in (stub, stub.models, huggingface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert names["evaluate"]("the model") == {"arc_easy": 0.5, "hellaswag": 0.5}


def test_the_line_of_a_report_that_a_page_quotes_is_in_one():
    (quoted,) = re.findall(r'line that begins with\s"(.+?)"', (ROOT / "docs/compact.md").read_text())
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))
    model[0].width = 32  # of the inputs or of the outputs
    report = sparsekit_ao.shrink(model, torch.randn(2, 32))[1]
    assert report.unlisted and any(line.startswith(quoted) for line in str(report).splitlines())


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies them")
@pytest.mark.parametrize("diff", re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL))
def test_the_diffs_of_contributing_apply(diff):
    subprocess.run(["git", "apply", "--check", "-"], input=diff, text=True, cwd=ROOT, check=True)
