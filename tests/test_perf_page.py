"""The HTML page in a real browser: it sorts, its plots are there, it asks nothing of a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tritonattn.perf import page, plots, schema, summary

NASTY = 'fa3 "x" <img src=http://example.org/a.png onerror=alert(1)>'
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
in_a_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"
)

# ms by which text and numbers sort otherwise: "1000" < "20.0" < "9.00"
TIMES = {1024: 0.009, 4096: 0.02, 16384: 1.0}
# What the browser found, as an attribute of the root element.
PROBE = """<script>addEventListener("load", () => {
const size = (e) => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
const root = document.documentElement;
root.dataset.probe = JSON.stringify({
  plots: Object.fromEntries([...document.querySelectorAll("figure")].map(
    (f) => [f.id, [...size(f.querySelector("svg")), f.querySelectorAll("svg path").length]])),
  requests: performance.getEntriesByType("resource").map((e) => e.name),
  width: [root.scrollWidth, innerWidth],
  boxes: [...document.querySelectorAll(".box")].map((b) => b.scrollWidth > b.clientWidth),
  ink: getComputedStyle(document.querySelector("svg text")).fill,
  sorted: [...document.querySelectorAll("th[aria-sort]")].map(
    (h) => [h.dataset.key, h.getAttribute("aria-sort")]),
  shown: [...document.querySelectorAll("#every-row tbody tr")].filter((r) => !r.hidden).length,
  images: document.images.length,
});
parent.postMessage(root.dataset.probe, "*");
});</script>"""
# A window is never narrower than 500 pixels, a frame is: it tells what the page in it found.
FRAME = """<iframe src="page.html" width="390" height="3000" style="border: 0"></iframe>
<script>addEventListener("message", (event) => {
document.documentElement.dataset.probe = event.data;
});</script>"""


def rows() -> list[dict[str, Any]]:
    """Return rows of three lengths; one provider's name is markup."""
    found = []
    for length, ms in TIMES.items():
        shape = {
            "run_id": "a", "suite": "decode", "op": "decode", "case": f"decode-{length}",
            "model": "llama3-8b", "lengths": f"1x1x{length}", "batch_size": 1, "total_q": 1,
            "max_q_len": 1, "total_kv": length, "max_kv_len": length, "page_size": 16,
            "device": "cuda", "gpu": "NVIDIA H200", "roof_read_gbps": 4478.0,
            "roof_matmul_tflops": 712.0, "mode": "graph",
        }  # fmt: skip
        for l2 in ("cold", "warm"):
            shape = {**shape, "l2": l2}
            for provider, slower in (("triton", 1.0), ("flashinfer-tc", 1.3), (NASTY, 0.9)):
                role = "ours" if provider == "triton" else "peer"
                times = dict.fromkeys(("ms_p20", "ms_p50", "ms_p80"), ms * slower)
                speed = {"gbps": 100 / ms / slower, "tflops": 0.8 / ms / slower}
                who = {"provider": provider, "role": role, "status": "ok"}
                found.append({**shape, **who, **times, **speed})
            no = {"provider": "xqa", "role": "peer", "status": "failed", "reason": NASTY}
            found.append({**shape, **no})
    return found


@pytest.fixture(scope="module")
def html() -> str:
    sweeps = summary.combine([schema.to_frame(rows())])
    return page.html(sweeps, plots.draw(sweeps))


@pytest.fixture(scope="module")
def browse(html: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return a function that opens the page, with the probe in it, and gives back the DOM."""
    folder = tmp_path_factory.mktemp("browser")
    (folder / "page.html").write_text(html.replace("</body>", f"{PROBE}</body>"))
    (folder / "frame.html").write_text(FRAME)

    def run(fragment: str = "", *options: str, file: str = "page.html") -> str:
        assert CHROMIUM is not None
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [*(options or ("--dump-dom",)), f"file://{folder}/{file}{fragment}"]
        environment = {**os.environ, "HOME": str(folder)}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    return run


class Reader(HTMLParser):
    """Collects the attributes of a page, and the cells of its table of every row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self._inside = self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside |= ("id", "every-row") in attrs
        if self._inside and tag == "tr":
            self.rows.append([])
        if self._inside and tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "table"
        self._cell &= tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data

    def column(self, title: str) -> list[str]:
        return [line[self.rows[0].index(title)] for line in self.rows[1:]]


def probe(dom: str) -> dict[str, Any]:
    (found,) = (v for _, name, v in Reader(dom).attributes if name == "data-probe")
    return json.loads(found)


def test_the_page_needs_nothing_from_elsewhere(html: str):
    reader = Reader(html)
    for tag, name, value in reader.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert value.startswith("#"), (tag, name, value)
        assert not name.startswith("on"), (tag, name)
    assert not set(reader.tags) & {"img", "link", "iframe", "object", "embed", "base"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert "@import" not in html
    assert "default-src 'none'" in html
    assert ("meta", "name", "viewport") in reader.attributes


def test_markup_in_names_is_text(html: str):
    assert NASTY not in html
    assert Reader(html).column("provider").count(NASTY) == 6


def test_ids_are_unique(html: str):
    ids = [value for _, name, value in Reader(html).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_headline_numbers_and_missing_rows(html: str):
    assert "<b>1.111</b><span>geomean time ratio to the best peer</span>" in html
    assert "<b>0.769</b><span>geomean time ratio to the best FlashInfer</span>" in html
    assert "below 1, ours is faster" in html
    assert "<h2>What is missing</h2>" in html
    assert "<dt>gpu</dt><dd>NVIDIA H200</dd>" in html


@in_a_browser
@pytest.mark.parametrize("down", [False, True])
def test_the_fragment_sorts_by_number(down: bool, browse: Callable[..., str]):
    dom = browse("#sort=-ms_p50" if down else "#sort=ms_p50")
    shown = Reader(dom).column("µs p50")
    ordered = ["8.10", "9.00", "11.7", "18.0", "20.0", "26.0", "900.0", "1000", "1300"]
    pairs = [text for text in ordered for _ in ("cold", "warm")]
    # What has no time comes last, whichever way.
    assert shown == (pairs[::-1] if down else pairs) + [""] * 6
    assert probe(dom)["sorted"] == [["ms_p50", "descending" if down else "ascending"]] * 2


@in_a_browser
def test_the_fragment_sorts_all_tables_that_have_the_key(browse: Callable[..., str]):
    dom = browse("#sort=-ratio_best")
    assert len(probe(dom)["sorted"]) == 3
    assert Reader(dom).column("ratio to best peer") == ["1.111"] * 6 + [""] * 18


@in_a_browser
def test_text_sorts_as_text_and_numbers_in_it_as_numbers(browse: Callable[..., str]):
    shown = Reader(browse("#sort=-case")).column("case")
    assert list(dict.fromkeys(shown)) == ["decode-16384", "decode-4096", "decode-1024"]


@in_a_browser
def test_an_unknown_key_leaves_the_order(html: str, browse: Callable[..., str]):
    assert Reader(browse("#sort=nothing")).rows == Reader(html).rows


@in_a_browser
def test_a_click_sets_the_fragment(html: str, tmp_path: Path):
    clicks = """<script>addEventListener("load", () => {
      const head = document.querySelector('#every-row th[data-key=ms_p50] button');
      const seen = [];
      head.click(); seen.push(location.hash); head.click(); seen.push(location.hash);
      document.documentElement.dataset.probe = JSON.stringify(seen);
    });</script>"""
    (tmp_path / "page.html").write_text(html.replace("</body>", f"{clicks}</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
               "--virtual-time-budget=3000", f"file://{tmp_path}/page.html"]  # fmt: skip
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert probe(done.stdout) == ["#sort=ms_p50", "#sort=-ms_p50"]
    assert Reader(done.stdout).column("µs p50")[0] == "1300"


@in_a_browser
def test_plots_filter_and_requests(browse: Callable[..., str]):
    found = probe(browse("#filter=triton%20COLD"))
    assert list(found["plots"]) == [
        "plot-ratio-decode", "plot-latency-decode-llama3-8b-batch-1",
        "plot-by-length-decode-llama3-8b-batch-1", "plot-roofline",
    ]  # fmt: skip
    for width, height, paths in found["plots"].values():
        assert width > 200
        assert height > 50
        assert paths > 5
    assert found["requests"] == []
    assert found["images"] == 0
    assert found["shown"] == 3


LOOKS = {
    "light": ((1280, 3000), (), "rgb(27, 31, 36)", (255, 255, 255)),
    "dark": ((1280, 3000), ("--blink-settings=preferredColorScheme=0",), "rgb(230, 237, 243)",
             (13, 17, 23)),
    "phone": ((390, 3000), (), "rgb(27, 31, 36)", (255, 255, 255)),
}  # fmt: skip


@in_a_browser
@pytest.mark.parametrize("look", list(LOOKS))
def test_looks(look: str, browse: Callable[..., str], tmp_path: Path):
    size, options, ink, paper = LOOKS[look]
    window = f"--window-size={size[0]},{size[1]}"
    file = "frame.html" if look == "phone" else "page.html"
    wait = "--virtual-time-budget=3000"
    found = probe(browse("", "--dump-dom", wait, window, *options, file=file))
    # Wide tables scroll in their boxes; the page itself never scrolls sideways.
    assert found["width"][0] <= found["width"][1] == size[0]
    assert any(found["boxes"]) or look != "phone"
    assert found["ink"] == ink
    picture = tmp_path / f"{look}.png"
    browse("", f"--screenshot={picture}", window, *options)
    with Image.open(picture) as image:
        assert image.size == size
        assert image.convert("RGB").getpixel((1, 1)) == paper
        assert len(image.convert("RGB").resize((390, 1000)).getcolors(10**6)) > 50
