"""How the HTML page looks: light and dark, on screen and on paper."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark; --page: #fff; --text: #1c2024; --dim: #5b6570; --line: #d8dde3; --head: #f3f5f7; --group: #f8f9fb;
  --bar: #c9dcf0; --warn: #8a4b00;
}
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e6e9ec; --dim: #a0a9b3; --line: #333a42; --head: #20252b; --group: #1a1e23; --bar: #24425f; --warn: #ffb661; }
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
table { border-collapse: separate; border-spacing: 0; font-size: .84rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .2rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { background: var(--head); position: sticky; top: 0; z-index: 1; font-weight: 600; }
thead tr + tr th { top: 1.75rem; }
th.left, td.left { text-align: left; }
th.group { text-align: center; }
th.first, td.first { border-left: 1px solid var(--line); }
tbody th { font-weight: 400; text-align: left; max-width: 28rem; overflow: hidden; text-overflow: ellipsis; }
tr.group td, tr.group th { background: var(--group); font-weight: 600; }
tr.own th { font-style: italic; }
tr.oneside th, tr.oneside td { color: var(--warn); }
tbody tr:last-child td, tbody tr:last-child th { border-bottom: 0; }
.share { display: inline-block; width: 6rem; height: .75em; text-align: left; }
.share i { display: block; height: 100%; background: var(--bar); border: 1px solid var(--dim); border-radius: 2px; min-width: 1px; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--dim); font-size: .87rem; max-width: 70rem; }
ul { margin: .3rem 0; padding-left: 1.3rem; }
li { overflow-wrap: anywhere; }
@media print {
  :root { --page: #fff; --text: #000; --dim: #444; --line: #bbb; --head: #eee; --group: #f6f6f6; --bar: #ccc; --warn: #000; }
  body { padding: 0; font-size: 10pt; max-width: none; }
  .scroll { overflow: visible; max-height: none; border: 0; }
  thead th { position: static; }
  thead { display: table-header-group; }
  table { font-size: 6.5pt; }
  th, td { padding: .1rem .25rem; }
  tr, figure { break-inside: avoid; }
  h2 { break-before: page; }
  h2.keep { break-before: avoid; }
  h2, h3 { break-after: avoid; }
  .share { width: 2.5rem; }
}
"""
