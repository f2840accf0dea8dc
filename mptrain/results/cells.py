"""The words of the table: what each heading and cell says, made from a row alone."""

from collections.abc import Callable

from mptrain.results.document import Cell, Column
from mptrain.results.row import BASELINE, NO_BASELINE, Group, Row
from mptrain.results.statistics import decimals

SHORT_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "none ran": "-",
}
MISSING = "n/a"


def columns(group: Group) -> list[tuple[Column, Callable[[Row], Cell]]]:
    """The columns of a group's table, and how a row fills each."""
    first = group.rows[0]
    return [
        (Column("precision", "scale", least=13), _precision),
        (Column("seeds", "status"), _seeds),
        (Column(first.metric, "± sd", number=True), _metric),
        (Column(f"minus {first.baseline}", "95 % interval", number=True), _difference),
        (Column("verdict", "paired seeds", least=13), _verdict),
        (Column("throughput", "ratio", "drop", number=True), lambda row: _throughput(row, len(units(group)) > 1)),
        (Column("memory", "ratio", "drop", number=True), _memory),
        (Column("skipped", "last scale", "drop", number=True), _steps),
        (Column("arithmetic", "dtypes", "fold"), arithmetic),
    ]


def units(group: Group) -> list[str]:
    """What throughput counts per second in this group; more than one only if a record is odd."""
    return sorted({row.throughput_unit for row in group.rows if row.throughput_unit})


def _precision(row: Row) -> Cell:
    return Cell(row.precision, f"scale {row.scale}")


def _seeds(row: Row) -> Cell:
    count = (row.finished or 0) + (row.diverged or 0)
    return Cell(str(count), row.status, "bad" if row.diverged else "plain")


def _metric(row: Row) -> Cell:
    if row.mean is None:
        return Cell("diverged", tone="bad")
    digits = decimals(row.margin)
    if row.finished == 2:
        detail = f"{row.minimum:.{digits}f}..{row.maximum:.{digits}f}"
    else:
        detail = "" if row.sd is None else f"± {row.sd:.{digits}f}"
    return Cell(f"{row.mean:.{digits}f}", detail)


def _difference(row: Row) -> Cell:
    if row.difference is None:
        return Cell("")
    digits = decimals(row.margin)
    low, high = row.difference_low, row.difference_high
    detail = "" if low is None else f"{low:+.{digits}f}..{high:+.{digits}f}"
    return Cell(f"{row.difference:+.{digits}f}", detail)


def _verdict(row: Row) -> Cell:
    if row.verdict in (BASELINE, NO_BASELINE):
        return Cell(row.verdict, tone="quiet")
    if row.diverged or row.verdict.startswith("worse"):
        return Cell(row.verdict, tone="bad")
    good = row.verdict.startswith(("equal", "better"))
    main, _, detail = row.verdict.partition(" (")
    return Cell(main, f"({detail}" if detail else "", "good" if good else "plain")


def _throughput(row: Row, show_unit: bool) -> Cell:
    if row.throughput is None:
        return Cell(MISSING, tone="quiet")
    unit = f" {row.throughput_unit}" if show_unit else ""
    return Cell(f"{significant(row.throughput)}{unit}", "shared" if row.beside else ratio(row.throughput_ratio))


def _memory(row: Row) -> Cell:
    if row.memory_mib is None:
        return Cell(MISSING, tone="quiet")
    return Cell(significant(row.memory_mib), ratio(row.memory_ratio))


def _steps(row: Row) -> Cell:
    low, high = row.final_scale_low, row.final_scale_high
    scale = "" if low is None else f"{low:g}" if low == high else f"{low:g}..{high:g}"
    return Cell(f"{row.skipped}/{row.attempted}", scale)


def arithmetic(row: Row) -> Cell:
    """Backend, and the dtypes of matmul, softmax, norm and loss."""
    dtypes = (row.matmul, row.softmax, row.norm, row.loss)
    return Cell(row.backend, "/".join(short_dtypes(names) for names in dtypes))


def short_dtypes(names: str) -> str:
    """The dtypes that ran, in few letters: "float16 and float32" -> "f16+f32"."""
    return "+".join(SHORT_DTYPES.get(name, name) for name in names.split(" and "))


def significant(value: float) -> str:
    """Four significant digits without an exponent in the usual range."""
    if value >= 1000:
        return f"{value:.0f}" if value < 1e9 else f"{value:.3e}"
    return f"{value:#.4g}".rstrip(".") if value >= 0.001 else f"{value:.3e}"


def ratio(value: float | None) -> str:
    """A ratio as 0.52x."""
    if value is None:
        return MISSING
    return f"{value:.2f}x" if 0.01 <= value < 1e6 else f"{value:.1e}x"
