"""Pages as HTML that needs nothing beside it: style and plots are inside, no script."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from itertools import groupby

import jinja2

from dlperf.core.version import VERSION
from dlperf.report.document import Block, Table


def to_html(title: str, blocks: Iterable[Block]) -> str:
    """The page, in light and dark colours, on screen and on paper."""
    return _TEMPLATE.render(
        title=title,
        generator=f"dlperf {VERSION}",
        style=_STYLE,
        body=_body(blocks, 0),
    )


def to_fragment(blocks: Iterable[Block]) -> str:
    """The page as a part of another one, such as a notebook, whose colours and fonts it takes."""
    return f'<div class="dlperf"><style>{_FRAGMENT_STYLE}</style>\n{_body(blocks, 3)}</div>'


def _body(blocks: Iterable[Block], depth: int) -> str:
    """The blocks; their headings are `depth` levels smaller."""
    return _BLOCKS.render(blocks=[(type(one).__name__, one) for one in blocks], depth=depth)


def _groups(table: Table) -> list[tuple[str, int]]:
    """The titles above the columns, and how many columns each spans."""
    return [(title, len(list(own))) for title, own in groupby(c.group for c in table.columns)]


def _classes(table: Table) -> list[str]:
    """The classes of each column's cells: to the left, and first of a group."""
    return [
        " ".join(
            ["left"] * column.align_left
            + ["first"] * (index > 0 and column.group != table.columns[index - 1].group)
        )
        for index, column in enumerate(table.columns)
    ]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="{{ generator }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>dlperf: {{ title }}</title>
<style>{{ style|safe }}</style>
</head>
<body>
{{ body|safe }}\
</body>
</html>
"""
_BLOCK_LIST = """\
{% for kind, block in blocks %}
{% if kind == "Heading" %}
<h{{ block.level + depth }}{% if block.anchor %} id="{{ block.anchor }}"{% endif %}>\
{{ block.text }}</h{{ block.level + depth }}>
{% elif kind == "Paragraph" %}
<p{% if block.is_small %} class="dim"{% endif %}>
{% for line in block.lines %}{{ line }}{% if not loop.last %}<br>{% endif %}{% endfor %}</p>
{% elif kind == "Facts" %}
<ul>
{% for name, text in block.pairs %}<li><b>{{ name }}</b>: {{ text }}</li>
{% endfor %}</ul>
{% elif kind == "Bullets" %}
<ul>
{% for item in block["items"] %}
<li{% if item.startswith("warning") %} class="warn"{% endif %}>{{ item }}</li>
{% endfor %}
</ul>
{% elif kind == "Preformatted" %}
<pre>{{ block.text }}</pre>
{% elif kind == "Image" %}
<figure><img alt="{{ block.caption }}" src="data:image/png;base64,{{ block.png|base64 }}">\
<figcaption>{{ block.caption }}</figcaption></figure>
{% else %}
{% set classes = block|classes %}
<div class="scroll"><table><thead>
{% if block|groups|length > 1 %}
<tr>{% for title, span in block|groups %}
<th colspan="{{ span }}" class="group{% if not loop.first %} first{% endif %}">{{ title }}</th>
{% endfor %}{% if block.shares %}<th></th>{% endif %}</tr>
{% endif %}
<tr>{% for column in block.columns %}
<th scope="col" class="{{ classes[loop.index0] }}">{{ column.title }}</th>
{% endfor %}{% if block.shares %}<th scope="col" class="left">share of the step</th>{% endif %}</tr>
</thead><tbody>
{% for cell in block.columns[0].cells %}{% set i = loop.index0 %}
{% set indent = cell|length - cell.lstrip(" ")|length %}
<tr class="{{ block.kinds[i] }}"><th scope="row"\
{% if indent %} style="padding-left:{{ "%.2f"|format(0.6 + 0.55 * indent) }}rem"{% endif %}\
{% if block.names %} title="{{ block.names[i] }}"{% endif %}>\
{% if block.links %}<a href="#{{ block.links[i] }}">{{ cell }}</a>\
{% else %}{{ cell.lstrip(" ") }}{% endif %}</th>
{% for column in block.columns[1:] %}
<td class="{{ classes[loop.index] }}">{{ column.cells[i] }}</td>
{% endfor %}{% if block.shares %}
<td class="left"><span class="share">\
<i style="width:{{ "%.1f"|format(100 * block.shares[i]) }}%"></i></span></td>
{% endif %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}
{% endfor %}
"""
_STYLE = """
:root {
  color-scheme: light dark; --page: #fff; --text: #1c2024; --dim: #5b6570; --line: #d8dde3;
    --head: #f3f5f7; --group: #f8f9fb;
  --bar: #c9dcf0; --warn: #8a4b00;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e6e9ec; --dim: #a0a9b3; --line: #333a42; --head: #20252b;
    --group: #1a1e23; --bar: #24425f; --warn: #ffb661; }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem; max-width: 110rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 1.6rem; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .4rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .3rem 0; max-width: 70rem; }
.dim { color: var(--dim); font-size: .87rem; }
.warn { color: var(--warn); }
a { color: inherit; }
.scroll { overflow: auto; max-height: 80vh; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; font-size: .84rem;
  font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { background: var(--head); position: sticky; top: 0; z-index: 1; font-weight: 600; }
thead tr + tr th { top: 1.75rem; }
th.left, td.left { text-align: left; }
th.group { text-align: center; }
th.first, td.first { border-left: 1px solid var(--line); }
tbody th { font-weight: 400; text-align: left; max-width: 28rem; overflow: hidden;
  text-overflow: ellipsis; }
tr.group td, tr.group th { background: var(--group); font-weight: 600; }
tr.own th { font-style: italic; }
tr.oneside th, tr.oneside td { color: var(--warn); }
tbody tr:last-child td, tbody tr:last-child th { border-bottom: 0; }
.share { display: inline-block; width: 6rem; height: .75em; text-align: left; }
.share i { display: block; height: 100%; background: var(--bar); border: 1px solid var(--dim);
  border-radius: 2px; min-width: 1px; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; }
figcaption { color: var(--dim); font-size: .87rem; max-width: 70rem; }
ul { margin: .3rem 0; padding-left: 1.3rem; }
li { overflow-wrap: anywhere; }
@media print {
  :root { --page: #fff; --text: #000; --dim: #444; --line: #bbb; --head: #eee; --group: #f6f6f6;
    --bar: #ccc; --warn: #000; }
  body { padding: 0; font-size: 10pt; max-width: none; }
  .scroll { overflow: visible; max-height: none; border: 0; }
  thead th { position: static; }
  thead { display: table-header-group; }
  table { font-size: 6.5pt; }
  th, td { padding: .1rem .25rem; }
  tr, figure { break-inside: avoid; }
  h2 { break-before: page; }
  h2:nth-of-type(-n+2) { break-before: avoid; }
  h2, h3 { break-after: avoid; }
  .share { width: 2.5rem; }
}
"""
_FRAGMENT_STYLE = """
.dlperf .dim { opacity: .75; font-size: .87em; }
.dlperf .scroll { overflow: auto; max-height: 80vh; }
.dlperf th, .dlperf td { text-align: right; white-space: nowrap; }
.dlperf .left, .dlperf th[scope=row] { text-align: left; }
.dlperf th.group { text-align: center; }
.dlperf tbody th { font-weight: 400; }
.dlperf tr.own th { font-style: italic; }
.dlperf .share { display: inline-block; width: 6em; height: .75em; }
.dlperf .share i { display: block; height: 100%; background: #6f9fcf; min-width: 1px; }
"""
_ENVIRONMENT = jinja2.Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
_ENVIRONMENT.filters.update(base64=_base64, classes=_classes, groups=_groups)
_TEMPLATE = _ENVIRONMENT.from_string(_PAGE)
_BLOCKS = _ENVIRONMENT.from_string(_BLOCK_LIST)
