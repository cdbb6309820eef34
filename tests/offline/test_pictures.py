"""The pages: in a real browser, without network, for any names and sizes."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptkit import RetentionPolicy, reshard
from ckptkit.catalog.box import Box
from ckptkit.catalog.entry import Role, SliceArray, TensorEntry, TensorSlice
from ckptkit.formats.detect import open_source
from ckptkit.offline.diff import DiffReport, diff
from ckptkit.offline.listing import Listed
from ckptkit.offline.pictures.heat_map import heat_maps
from ckptkit.offline.pictures.page import PAGE
from ckptkit.offline.pictures.pages import write_diff_page, write_inspect_page
from ckptkit.offline.pictures.reshard_map import flows
from ckptkit.offline.pictures.shard_map import rank_totals, shard_maps
from ckptkit.offline.pictures.timeline import LEFT, WIDTH, timeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


HOSTILE = '</title><script>document.title="owned"</script><img src=http://x.invalid/a onerror=alert(1)>"\'&'


PAGES = ["two", "w64", "one", "many", "diff"]


@pytest.fixture(scope="module")
def pages(zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of 2 ranks (with a reshard to 3), 64 ranks, one tensor with a hostile name, 2,000 tensors, a diff."""
    work = tmp_path_factory.mktemp("pages")
    two = zoo / "verl_fsdp2_w2"
    for ranks in (3, 64):
        reshard(str(two), str(work / f"w{ranks}"), world_size=ranks)
    save_file({HOSTILE: np.zeros((4, 4), np.float32)}, work / "one.safetensors")
    many = {f"model.layers.{i // 10}.block{i}.weight": np.zeros((4, 4), np.float32) for i in range(2000)}
    save_file(many, work / "many.safetensors")
    found = {name: work / f"{name}.html" for name in PAGES}
    write_inspect_page(str(two), str(found["two"]), other=str(work / "w3"))
    for source in ("w64", "one.safetensors", "many.safetensors"):
        write_inspect_page(str(work / source), str(found[source.partition(".")[0]]))
    write_diff_page(diff(str(two), str(zoo / "hf_ref_llama_untied")), str(found["diff"]))
    return found


@pytest.fixture
def page(pages: dict[str, Path], name: str) -> str:
    """The text of the page of this name."""
    return pages[name].read_text(encoding="utf-8")


def heights(page: str) -> list[float]:
    return [float(height) for height in re.findall(r'<svg viewBox="0 0 [\d.]+ ([\d.]+)"', page)]


@pytest.mark.parametrize("name", PAGES)
def test_a_browser_shows_every_bar_and_sends_no_request(pages, page, tmp_path, name):
    if CHROMIUM is None:
        # Without a browser the pages are still parsed; CI installs one.
        assert not os.environ.get("CKPTKIT_REQUIRE_BROWSER"), "CI must have chromium: apt-get install chromium"
        pytest.skip("no chromium here: apt-get install chromium")
    always = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--enable-logging=stderr"]
    command = [CHROMIUM, *always, "--v=0", "--dump-dom", f"--user-data-dir={tmp_path}/p", pages[name].as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)
    drawn = [len(re.findall("<rect|<path", text)) for text in (done.stdout, page)]
    assert drawn[0] == drawn[1] > 0
    assert "Refused to" not in done.stderr and "<title>owned</title>" not in done.stdout


@pytest.mark.parametrize("name", PAGES)
def test_no_rectangle_exceeds_its_picture_and_no_picture_a_page(page, name):
    assert max(heights(page)) <= PAGE + 6
    for box, body in re.findall(r'<svg viewBox="0 0 ([\d. ]+)"(.*?)</svg>', page, re.S):
        width, height = map(float, box.split())
        for x, y, w, h in re.findall(r'x="([-\d.]+)" y="([-\d.]+)" width="([\d.]+)" height="([\d.]+)"', body):
            assert float(x) >= -0.1 and float(x) + float(w) <= width + 0.1
            assert float(y) >= -0.1 and float(y) + float(h) <= height + 0.1
        for thickness, cells in re.findall(r'<g [^>]*stroke-width="([\d.]+)">(.*?)</g>', body):
            for x, y, w in re.findall(r'd="M([\d.]+) ([\d.]+)h([\d.]+)"', cells):
                assert float(x) + float(w) <= width + 0.1
                assert float(y) + float(thickness) / 2 <= height + 0.1


@pytest.mark.parametrize(
    ("name", "said"), [("two", "scalar tensors are hidden"), ("many", "The 300 largest of 2000 tensors are drawn.")]
)
def test_a_page_says_what_it_does_not_draw(page, name, said):
    assert said in page and len(page) < 1_000_000


def entry(name: str, rows: int, ranks: tuple[int, ...] = (0, 1), state: str = "") -> TensorEntry:
    """Return a tensor of 4 columns whose rows are split over two ranks; with `state`, a moment of the parameter."""
    half = rows // 2
    boxes = [Box((0, 0), (half, 4)), Box((half, 0), (rows - half, 4))]
    parts = [TensorSlice(box, "f", 0, box.sizes[0] * 16, rank=rank) for box, rank in zip(boxes, ranks, strict=True)]
    role = Role.OPTIMIZER if state else Role.MODEL
    return TensorEntry(f"{name}.{state}", "float32", (rows, 4), SliceArray.of(parts, 2), role, name, state=state)


def bars(picture: str) -> dict[str, float]:
    """Return the length of each bar by its name."""
    found = {}
    for row in picture.split("<text ")[1:]:
        if name := re.match(r'x="[\d.]+" y="[\d.]+" text-anchor="end">([^<]+)', row):
            found[name[1]] = 0.0
        found[list(found)[-1]] += sum(map(float, re.findall(r'<rect [^>]*width="([\d.]+)"', row)))
    return found


def test_layers_with_equal_sharding_share_a_bar_and_others_do_not():
    layers = {i: f"model.layers.{i}.w" for i in range(80)}
    odd = {50: entry(layers[50], 8, (1, 0)), 60: entry(layers[60], 6)}
    panel = shard_maps(odd.get(i) or entry(name, 8) for i, name in layers.items())[-1]
    assert list(bars(panel.picture)) == [f"model.layers.{i}.w" for i in ("{0-49,51-59,61-79}", "50", "60")]
    assert "78 of 8x4 float32" in panel.picture and "share a bar" in panel.explanation


def test_the_length_of_a_bar_is_proportional_to_the_size_of_its_tensors():
    names = ["a.w", "b.0.w", "b.1.w", "tiny.w"]
    drawn = bars(shard_maps(entry(name, 8 if name == "tiny.w" else 4096) for name in names)[-1].picture)
    assert drawn["b.{0-1}.w"] == pytest.approx(2 * drawn["a.w"], abs=0.1)
    assert 0 < drawn["tiny.w"] < drawn["a.w"] / 10


def test_the_maps_of_the_optimizer_are_behind_one_click():
    states = ["exp_avg", "exp_avg_sq"]
    panels = shard_maps([entry("a.w", 8), *(entry("a.w", 8, state=state) for state in states)])
    assert [bool(panel.behind) for panel in panels] == [False, False, True]
    assert list(bars(panels[-1].picture)) == ["a.w · exp_avg, exp_avg_sq"]


def test_step_counters_are_not_drawn_and_other_moments_open_with_a_click():
    names = ["layers.0.w", "lm_head.weight"]
    states = {f"optimizer: {n} {state}": 0.5 for n in names for state in ("exp_avg", "step")}
    panels = heat_maps(dict.fromkeys(names, 0.0) | states | {"master: layers.0.w": 0.5, "rng.0.torch": 1.0})
    headings = {panel.heading.removeprefix("Change by layer: "): panel.behind for panel in panels}
    differ = {"optimizer: exp_avg": 2, "master": 1, "other state": 1}
    assert headings == {"model": "", **{name: f"{n} of {n} tensors differ" for name, n in differ.items()}}
    assert "2 step counters are hidden" in panels[0].explanation


def test_equal_small_and_infinite_changes_have_distinct_colours():
    picture = heat_maps({"layers.0.a": 0.0, "layers.0.b": 1e-5, "layers.0.c": float("inf")})[0].picture
    looks = re.findall(r'<g ([^>]+) stroke-width="[\d.]+"><path [^>]*><title>', picture)
    assert len(looks) == len(set(looks)) == 3
    assert "no tensor in common" in heat_maps({})[0].explanation


def test_a_large_grid_folds_experts_and_then_layers_and_shows_the_largest_change():
    changes = {f"layers.{i}.experts.{j}.up": 1e-6 for i in range(40) for j in range(60)}
    changes["layers.3.experts.7.up"] = 0.5
    (panel,) = heat_maps(changes)
    assert "Numbered modules, such as experts, share a cell." in panel.explanation
    assert panel.picture.count("<path") == 40 + 6  # and the legend
    assert "layers.3.experts.*.up\n60 tensors, largest relative change 0.5<" in panel.picture

    (panel,) = heat_maps({f"layers.{i}.{name}": 0.0 for i in range(1001) for name in ("a", "b")})
    assert "A row shows 6 consecutive layers, named by the first." in panel.explanation
    assert "share a cell" not in panel.explanation
    assert "layers.0.b\n6 tensors, all equal<" in panel.picture
    assert "layers.996.b\n5 tensors, all equal<" in panel.picture


def test_the_rows_of_a_grid_are_in_the_order_of_the_layers_numbers():
    names = sorted(f"model.layers.{i}.w" for i in range(12))  # as in a safetensors file
    picture = heat_maps(dict.fromkeys(["embed.w", *names, "layers.²2.w"], 0.5))[0].picture
    rows = re.findall(r'text-anchor="end">([^<]+)<', picture)
    assert rows == ["outside of layers", *(f"model.layers.{i}" for i in range(12)), "layers.²2"]


@pytest.mark.parametrize("name", ["9" * 1_000_000, "a." + "1" * 1_000_000 + "-", "1." * 500_000])
def test_a_long_name_of_digits_is_drawn_at_once(name):
    assert "0.5<" in heat_maps({name: 0.5})[0].picture


@pytest.mark.parametrize("layers", [180, 200, 1250])
def test_a_grid_of_many_layers_fits_on_a_page_of_a_small_file(tmp_path, layers):
    names = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(layers) for name in "qkvo"]
    changes = {**dict.fromkeys(names, 0.25), **{f"optimizer: {name} exp_avg": 0.25 for name in names}}
    write_diff_page(DiffReport("A", "B", 0, 0, (), (), (), changes=changes), str(tmp_path / "page.html"))
    assert max(heights((tmp_path / "page.html").read_text(encoding="utf-8"))) <= PAGE
    assert (tmp_path / "page.html").stat().st_size < 500_000


def test_bars_and_ribbons_of_a_reshard_count_every_byte_once(zoo, tmp_path):
    reshard(str(zoo / "verl_fsdp2_w2"), str(tmp_path / "w3"), world_size=3)
    urls = str(zoo / "verl_fsdp2_w2"), str(tmp_path / "w3")
    before, after = (open_source(url).catalog.tensors.values() for url in urls)
    matrix, totals = flows(before, after), rank_totals(before)
    assert matrix.shape == (2, 3) and matrix.sum() == sum(entry.nbytes for entry in after)
    assert sorted(totals) == [0, 1] and sum(totals.values()) == sum(entry.nbytes for entry in before)


def kept(*values: float, steps: int = 0) -> list[Listed]:
    """Return so many checkpoints of a run, or one with each of these losses."""
    items = [Listed(f"step_{i}", "committed", i, 100, keep=True, why="why") for i in range(steps or len(values))]
    return items if steps else [replace(item, metrics={"loss": x}) for item, x in zip(items, values, strict=True)]


def test_the_timeline_draws_each_limit_at_its_position():
    items = [replace(item, keep=i > 6) for i, item in enumerate(kept(steps=10))]
    picture = timeline(items, RetentionPolicy(max_num=3, max_mem=500)).picture
    lines = [float(x) for x in re.findall(r'class="limit" d="M([\d.]+) ', picture)]
    slot = (WIDTH - LEFT - 10) / 10
    assert lines == pytest.approx([LEFT + 7 * slot, LEFT + 5 * slot], abs=0.1)


def test_a_timeline_shows_where_checkpoints_are_absent_and_the_name_of_one_without_a_step():
    items = [*kept(steps=1), replace(kept(steps=1)[0], step=5, absent_before=3), Listed("half-made", "in progress")]
    picture = timeline(items, RetentionPolicy(max_num=1)).picture
    assert "3 saved in between, now gone" in picture and "half-made" in picture
    assert (picture.count('class="gone"'), picture.count('class="limit"')) == (2, 1)  # two: the mark, and the legend


def heights_of_metric(picture: str) -> list[float]:
    return [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([^"]+)"', picture)]


def test_the_timeline_draws_metrics_above_the_bars_with_gaps_for_nan():
    picture = timeline(kept(3.0, 2.0, float("nan"), 1.0)).picture
    ys = heights_of_metric(picture)
    assert ys[0] < ys[1] < ys[3] < min(float(y) for y in re.findall(r'<rect [^>]*y="([\d.]+)"', picture))
    assert re.search(r'class="line" d="M\S+ \S+L\S+ \S+M', picture) and "loss nan" in picture


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [float("inf")], [-1e308, 1e308], [5e-324, 0.0]])
def test_the_line_of_any_metric_fits_its_picture(values):
    ys = heights_of_metric(timeline(kept(*values)).picture)
    assert len(ys) == len(values) and all(0 <= y <= 110 for y in ys)
