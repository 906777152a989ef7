"""The frame of the HTML page: its style, its script, and where the parts go."""

from __future__ import annotations

from string import Template

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #59636e;
  --line: #d1d9e0; --panel: #f6f8fa; --mark: #0b5cad; --warn: #9a3412; --warn-paper: #fff4ec; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9aa4af; --line: #30363d; --panel: #161b22;
    --mark: #6cb6ff; --warn: #ffb088; --warn-paper: #2b1a12; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 80rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.3rem; }
p { margin: 0.3rem 0; }
.soft { color: var(--soft); font-size: 0.9rem; }
.note { border-left: 4px solid var(--warn); background: var(--warn-paper); color: var(--warn);
  padding: 0.5rem 0.8rem; margin: 0.7rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.7rem;
  margin: 1rem 0; }
.tile { border: 1px solid var(--line); border-radius: 8px; padding: 0.6rem 0.8rem;
  background: var(--panel); }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2;
  font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--soft); font-size: 0.82rem; line-height: 1.35; }
.box { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 8px;
  margin-top: 0.4rem; }
table { border-collapse: collapse; font-size: 0.85rem; min-width: 100%; overflow-wrap: normal; }
th, td { padding: 0.28rem 0.6rem; text-align: left; white-space: nowrap;
  border-bottom: 1px solid var(--line); vertical-align: top; }
tbody tr:last-child td { border-bottom: 0; }
th { position: sticky; top: 0; background: var(--panel); padding: 0; }
th button { all: unset; box-sizing: border-box; width: 100%; padding: 0.35rem 0.6rem;
  font-weight: 600; cursor: pointer; }
th button:hover, th[aria-sort] button { color: var(--mark); }
th button:focus-visible { outline: 2px solid var(--mark); outline-offset: -2px; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.wrap { white-space: normal; min-width: 16rem; max-width: 40rem; overflow-wrap: anywhere; }
tbody tr:hover { background: var(--panel); }
.plots { columns: 26rem; column-gap: 1.5rem; margin-top: 0.6rem; }
figure { margin: 0 0 1.5rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif
  !important; }
input { font: inherit; color: inherit; background: var(--paper); border: 1px solid var(--line);
  border-radius: 6px; padding: 0.3rem 0.6rem; width: min(100%, 24rem); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.1rem 1rem; font-size: 0.9rem; }
dt { color: var(--soft); }
dd { margin: 0; }
"""

# The fragment is the whole state: `#sort=KEY`, `#sort=-KEY` for descending, `&filter=WORDS`.
SCRIPT = """
const parameters = () => new URLSearchParams(location.hash.slice(1));
const valueOf = (row, column) => {
  const cell = row.cells[column];
  if (cell.dataset.v !== undefined) return Number(cell.dataset.v);
  return cell.classList.contains("n") || !cell.textContent ? null : cell.textContent;
};
const sortTable = (table, key, down) => {
  const heads = [...table.tHead.rows[0].cells];
  const column = heads.findIndex((head) => head.dataset.key === key);
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  const rows = [...table.tBodies[0].rows];
  rows.sort((a, b) => a.dataset.i - b.dataset.i);
  if (column >= 0) {
    heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((a, b) => {
      const x = valueOf(a, column), y = valueOf(b, column);
      if (x === null || y === null) return (x === null) - (y === null);
      const order = typeof x === "number" && typeof y === "number"
        ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return down ? -order : order;
    });
  }
  table.tBodies[0].append(...rows);
};
const show = () => {
  const sort = parameters().get("sort") || "", down = sort.startsWith("-");
  const key = down ? sort.slice(1) : sort;
  document.querySelectorAll("table").forEach((table) => sortTable(table, key, down));
  const filter = parameters().get("filter") || "", field = document.querySelector("#filter");
  if (field.value !== filter) field.value = filter;
  const words = filter.toLowerCase().split(/\\s+/);
  document.querySelectorAll("#every-row tbody tr").forEach((row) => {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  });
};
const change = (name, value, keep) => {
  const now = parameters();
  now.set(name, value);
  if (keep) location.hash = now; else location.replace("#" + now);
};
document.addEventListener("click", (event) => {
  const head = event.target.closest("th[data-key]");
  if (!head) return;
  const up = parameters().get("sort") === head.dataset.key;
  change("sort", (up ? "-" : "") + head.dataset.key, true);
});
document.querySelector("#filter").addEventListener("input", (event) =>
  change("filter", event.target.value, false));
addEventListener("hashchange", show);
show();
"""

# The policy makes sure that the page fetches nothing, whatever is in it.
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<h1>$title</h1>
$notes
<p>$explained</p>
<div class="tiles">$tiles</div>
$headline
$times
$plots
$tables
<h2>Every row</h2>
<p class="soft">One row for each case, provider, mode and L2 state; a click on a header sorts.</p>
<p><input id="filter" type="search" placeholder="words to filter by: decode graph cold"
 aria-label="filter"></p>
$rows
<h2>Environment</h2>
<dl>$environment</dl>
<script>$script</script>
</body>
</html>
""")
