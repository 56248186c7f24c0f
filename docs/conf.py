"""Configuration of the documentation site: `python -m sphinx -W docs out/site` builds it, without network.

Before Sphinx reads the pages, the pictures, the tables, the gallery of patterns and the pages of the tutorials are
generated into `docs/_generated` from masks, CSVs and scripts. Numbers in sentences come from the CSVs too: `{{ name }}`
in a page is a value of `figures.values()`.
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import figures  # noqa: E402
import gallery  # noqa: E402
import pictures  # noqa: E402
import printed  # noqa: E402
import tutorial_pages  # noqa: E402

import sparsekit_ao  # noqa: E402

GENERATED = HERE / "_generated"
pictures.write_all(GENERATED)
figures.write_all(GENERATED)
gallery.write(GENERATED)
tutorial_pages.write_all(GENERATED)
printed.run_all(HERE.parent)

project = "sparsekit_ao"
copyright = "the authors, BSD-3-Clause"
version = release = sparsekit_ao.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_generated/*.md"]  # included by pages, not pages themselves

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = figures.values()
myst_heading_anchors = 3
default_role = "literal"  # docstrings use single backticks for code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "optional_keys, bool_masks, mask_class"}  # for classes of this library
autodoc_mock_imports = ["lightning", "transformers", "accelerate"]  # optional; their callbacks are documented without
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"sparsekit_ao {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False

LINKS = {  # from files that are read in the repository, too, to their pages
    "selection/README.md": "selection.md",
    "distributed/README.md": "distributed.md",
    "../distributed/README.md": "distributed.md",
    "dynamic/README.md": "dynamic.md",
    "removal/README.md": "removal.md",
    "checkpoints/README.md": "checkpoints.md",
    "../checkpoints/README.md": "checkpoints.md",
    "export/README.md": "export.md",
    "triton/README.md": "triton.md",
    "sparsekit_ao/README.md": "inside/index.md",
    "../CONTRIBUTING.md": "../contributing.md",
    "docs/choose.md": "choose.md",
    "docs/concepts.md": "concepts.md",
    "docs/export.md": "export.md",
}


def _relink(app, relative_path, parent_docname, content):  # type: ignore[no-untyped-def]
    """Point links between the package's README files to the pages that include them."""
    for link, page in LINKS.items():
        content[0] = re.sub(rf"\]\({re.escape(link)}(#[^)]*)?\)", rf"]({page}\1)", content[0])


def _with_outputs(app, docname, source):  # type: ignore[no-untyped-def]
    """Show what the blocks of a page print."""
    source[0] = printed.page(f"docs/{docname}.md", source[0])


def _escape(text: str) -> str:
    """A line of a docstring as reStructuredText: what is special there, and not in single backticks, is escaped."""
    spans = text.split("`")
    for k, span in enumerate(spans):
        if k % 2 == 0:
            span = span.replace("*", "\\*").replace("|", "\\|")
            spans[k] = f"\\ {span}" if k and span[:1].isalnum() else span  # `*`s
    return "`".join(spans)


def _docstring(app, what, name, obj, options, lines):  # type: ignore[no-untyped-def]
    """Escape docstrings but for their examples, and give each attribute a line of its own."""
    if "Attributes:" in lines:
        start = lines.index("Attributes:") + 1
        end = next((k for k in range(start, len(lines)) if not lines[k].strip()), len(lines))
        entries = re.split(r"\n(?=    \w)", "\n".join(lines[start:end]))  # with the lines that continue them
        found = [re.match(r"    (\w+(?:, \w+)+)(:.*)", one, re.DOTALL) for one in entries]
        split = [
            [f"    {own}{m[2]}" for own in m[1].split(", ")] if m else [one]
            for m, one in zip(found, entries, strict=True)
        ]
        lines[start:end] = "\n".join(one for several in split for one in several).split("\n")
    in_example = False
    for k, line in enumerate(lines):
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if not in_example and line.count("`") % 2 == 0:
            lines[k] = _escape(line)


def setup(app):  # type: ignore[no-untyped-def]
    """Register the hooks above."""
    app.connect("source-read", _with_outputs)
    app.connect("include-read", _relink)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
