"""Pictures by Vega-Lite, drawn here and now: as SVG that stands in the page, and as PNG and SVG files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

from mptrain.errors import UserError

Points = Sequence[dict[str, Any]]
LINE, AXIS = "#dddfe3", "#8b8f96"
"""Colours of grid and axes; the page's style gives the grid and all texts the colours of its own."""
KEPT_TAGS = {"svg", "g", "path", "line", "rect", "text", "tspan", "defs", "clipPath", "linearGradient", "stop"}
KEPT_ATTRIBUTES = {
    "viewBox", "width", "height", "transform", "d", "x", "y", "x1", "x2", "y1", "y2", "fill", "fill-opacity", "stroke",
    "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-dashoffset", "text-anchor", "font-size",
    "font-weight", "opacity", "clip-path", "id", "gradientUnits", "offset", "stop-color",
}  # fmt: skip
DEFAULTS = {"opacity": "1", "transform": "translate(0,0)", "stroke-dasharray": "none", "font-size": "11px"}
KIND_COLOURS = ("#4c78a8", "#9ecae9", "#f58518", "#e45756", "#72b7b2", "#b279a2", "#9d755d")
WIDE, TALL = 330, 190  # of one picture, without its axes


@cache
def altair() -> ModuleType:
    """The library, or what to type to get it."""
    try:
        import altair
        import vl_convert  # noqa: F401 - draws what altair describes
    except ImportError as error:
        raise UserError(
            f"mptrain report draws its figures with altair and vl-convert-python, and {error.name} is not installed; "
            "type: pip install 'mptrain[report]'"
        ) from error
    return altair


def lines(points: Points, y: str, log: bool) -> Any:
    """A line a run over steps, with a band over its seeds. points: {run, step, mean, low, high}."""
    alt = altair()
    order = list(dict.fromkeys(point["run"] for point in points))
    kind = alt.Scale(type="log") if log else alt.Scale(zero=False)
    base = alt.Chart(alt.Data(values=list(points)), width=WIDE, height=TALL).encode(
        x=_step(alt), color=_colours(alt, order)
    )
    band = base.mark_area(opacity=0.18).encode(y=alt.Y("low:Q", title=y, scale=kind), y2="high:Q")
    # Equal domains, so that the legends of colours and dashes are drawn as one.
    dashes = alt.StrokeDash("run:N", scale=alt.Scale(domain=order), title=None, legend=_legend(alt))
    line = base.mark_line(strokeWidth=1.8).encode(y=alt.Y("mean:Q", title=y, scale=kind), strokeDash=dashes)
    return alt.layer(band, line)


def steps(points: Points, skips: Points) -> Any:
    """Loss scales over steps, a line a seed, and a mark at each skipped update. points: {run, seed, step, scale}."""
    alt = altair()
    order = list(dict.fromkeys(point["run"] for point in points))
    y = alt.Y("scale:Q", title="loss scale", scale=alt.Scale(type="log", base=2))
    base = dict(width=WIDE, height=TALL)
    moves = (
        alt.Chart(alt.Data(values=list(points)), **base)
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(x=_step(alt), y=y, color=_colours(alt, order), detail="seed:N")
    )
    marks = (
        alt.Chart(alt.Data(values=list(skips)), **base)
        .mark_point(shape="triangle-down", filled=True, size=45, opacity=0.9)
        .encode(x="step:Q", y=y, color=_colours(alt, order))
    )
    return alt.layer(moves, marks)


def heat(points: Points, rows: Sequence[str], title: str) -> Any:
    """Shares by layer and step. points: {layer, step, share}."""
    alt = altair()
    return (
        alt.Chart(alt.Data(values=list(points)), width=WIDE * 3 // 4, height=max(60, 13 * len(rows)))
        .mark_rect()
        .encode(
            x=alt.X("step:O", title="step", axis=alt.Axis(labelOverlap=True, labelAngle=0)),
            y=alt.Y("layer:N", sort=list(rows), title=None, axis=alt.Axis(labelLimit=220)),
            color=alt.Color("share:Q", title=title, scale=alt.Scale(scheme="viridis", domain=[0, 1]),
                            legend=alt.Legend(format="%", orient="top", gradientLength=200)),
        )
    )  # fmt: skip


def bars(points: Points, rows: Sequence[str], kinds: Sequence[str], title: str) -> Any:
    """Stacked bars. points: {run, kind, value}."""
    alt = altair()
    return (
        alt.Chart(alt.Data(values=list(points)), width=WIDE * 3 // 4, height=24 * len(rows))
        .mark_bar()
        .encode(
            x=alt.X("value:Q", title=title),
            y=alt.Y("run:N", sort=list(rows), title=None, axis=alt.Axis(labelLimit=160)),
            color=alt.Color(
                "kind:N",
                scale=alt.Scale(domain=list(kinds), range=list(KIND_COLOURS[: len(kinds)])),
                title=None,
                legend=alt.Legend(orient="top", columns=4),
            ),
            order=alt.Order("place:Q"),
        )
    )


def _colours(alt: Any, order: list[str]) -> Any:
    return alt.Color("run:N", scale=alt.Scale(domain=order), title=None, legend=_legend(alt))


def _step(alt: Any) -> Any:
    return alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, format="d"))


def _legend(alt: Any) -> Any:
    return alt.Legend(orient="bottom", columns=2, labelLimit=170, symbolType="stroke", symbolSize=300, symbolOpacity=1)


def _described(chart: Any, background: str) -> dict[str, Any]:
    config = {
        "background": background,
        "font": "sans-serif",
        "axis": {"gridColor": LINE, "domainColor": AXIS, "tickColor": AXIS, "labelFontSize": 11, "titleFontSize": 11,
                 "titleFontWeight": "normal"},
        "legend": {"labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal", "symbolStrokeWidth": 2},
        "view": {"stroke": LINE},
    }  # fmt: skip
    return {**chart.to_dict(validate=False), "config": config}


def inline(chart: Any, name: str) -> str:
    """The picture as SVG to stand in a page: no more than shapes and texts; name: keeps its inner ids apart."""
    import vl_convert

    root = ElementTree.fromstring(vl_convert.vegalite_to_svg(_described(chart, "transparent")))
    _clean(root, name, {})
    root.attrib = {"viewBox": root.get("viewBox", ""), "width": root.get("width", ""), "aria-hidden": "true"}
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: Any, name: str, ids: dict[str, str]) -> None:
    """Keeps the tags and attributes that are listed, without namespaces; numbers ids anew."""

    def renamed(found: re.Match[str]) -> str:
        return f"url(#{ids.setdefault(found[1], f'{name}-{len(ids)}')})"

    element.tag = element.tag.partition("}")[2] or element.tag
    kept = {key: value for key, value in element.attrib.items() if key in KEPT_ATTRIBUTES}
    kept = {
        key: re.sub(r"url\(#([^)]*)\)", renamed, value) for key, value in kept.items() if DEFAULTS.get(key) != value
    }
    if "id" in kept:
        kept["id"] = ids.setdefault(kept["id"], f"{name}-{len(ids)}")
    element.attrib = kept
    for child in list(element):
        tag = child.tag.partition("}")[2] or child.tag
        unseen = child.get("display") == "none" or child.get("d") in ("", "M0,0h0v0h0Z")
        if tag not in KEPT_TAGS or unseen:
            element.remove(child)
            continue
        _clean(child, name, ids)
        if child.tag == "g" and not child.attrib and not (child.text or "").strip():
            place = list(element).index(child)
            element.remove(child)
            for inner in reversed(list(child)):
                element.insert(place, inner)


def files_of(chart: Any) -> dict[str, bytes]:
    """{ending: content}: the picture on white as PNG, twice as fine, and as SVG."""
    import vl_convert

    draw: dict[str, Callable[[], Any]] = {
        "svg": lambda: vl_convert.vegalite_to_svg(_described(chart, "white")).encode(),
        "png": lambda: vl_convert.vegalite_to_png(_described(chart, "white"), scale=2),
    }
    return {ending: content() for ending, content in draw.items()}
