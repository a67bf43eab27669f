"""Sphinx configuration. ``scripts/docs`` builds the pages into ``docs/_build/html``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generate  # noqa: E402
from docutils import nodes  # noqa: E402
from docutils.utils.math.latex2mathml import tex2mathml  # noqa: E402

from dlperf.core.version import VERSION  # noqa: E402

project = "dlperf"
author = "the authors of dlperf"
version = release = VERSION
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_generated/*"]
myst_enable_extensions = ["deflist", "dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_mock_imports = ["lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True

smartquotes = False  # options begin with two hyphens
html_math_renderer = "mathml"
# furo: light and dark by itself, readable on a phone, no JavaScript build.
html_theme = "furo"
html_title = f"dlperf {VERSION}"
html_static_path = ["_static"]
html_css_files = ["dlperf.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_sphinx = False
templates_path: list[str] = []

generate.write(Path(__file__).parent / "_generated")


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    mathml = tex2mathml(node.astext(), as_block=True)
    translator.body.append(f'<div class="equation">{mathml}</div>')
    raise nodes.SkipNode


def _without_fields(_app: Any, what: str, name: str, *_: Any) -> tuple[str, None] | None:
    """No signature for a class of data, which comes from functions and files."""
    return ("", None) if what == "class" and name.rpartition(".")[2][0].isupper() else None


def setup(app: Any) -> None:
    """Equations as MathML: browsers draw it without a script from another host."""
    app.connect("autodoc-process-signature", _without_fields)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
