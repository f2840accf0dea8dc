"""The sentences around the tables: what a group is, what must not be overlooked in it, and why groups are apart."""

from typing import Any

from mptrain.results.cells import columns, units
from mptrain.results.document import Block, Document
from mptrain.results.row import Group, Row, Table

FEW = 3  # groups that differ in more fields than this need no explanation
LOOKED_BACK = 30  # groups; keeps a folder of a thousand single runs quick
MOST_NOTES = 20


def document_of(table: Table) -> Document:
    """All the table says, in words: a block for each group, then why groups are apart, then the folders left out."""
    blocks = []
    for group in table.groups:
        filled = columns(group)
        cells = [[fill(row) for _, fill in filled] for row in group.rows]
        blocks.append(Block(title(group), subtitle(group), [column for column, _ in filled], cells, group_notes(group)))
    lists = {"Kept apart": apart(table), "Not in the table": [excluded_line(row) for row in table.excluded]}
    return Document(blocks, {heading: lines for heading, lines in lists.items() if lines})


def title(group: Group) -> str:
    """Recipe, data with its kind, steps and batch size."""
    row = group.rows[0]
    kind = "SYNTHETIC data" if row.data_kind == "synthetic" else f"{row.data_kind} data"
    accumulate = group.key.get("accumulate", 1)
    batch = f"batch {row.batch_size}" if accumulate == 1 else f"batch {row.batch_size} (accumulate {accumulate})"
    return f"{row.recipe} on {row.data} ({kind}), {row.steps} steps, {batch}"


def subtitle(group: Group) -> list[str]:
    """Where it ran, on what, and how metric, throughput and memory were measured."""
    row = group.rows[0]
    device = row.device_name if row.device in row.device_name else f"{row.device} {row.device_name}".rstrip()
    commits = sorted({commit for each in group.rows for commit in each.commits.split(", ")})
    where = f"device {device}, torch {row.torch}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}"
    if group.key.get("settings"):
        where += f", settings {group.key['settings']}"
    measured = (
        f"{row.metric} ({'higher' if row.higher_is_better else 'lower'} is better) evaluated in {row.eval_precision}"
    )
    if units(group):
        measured += f"; throughput in {', '.join(units(group))}"
    ways = sorted({each.memory_how for each in group.rows if each.memory_how})
    if ways:
        measured += f"; peak memory in MiB ({'; '.join(ways)})"
    return [where, f"{measured}; dtypes of matmul/softmax/norm/loss"]


def group_notes(group: Group) -> list[str]:
    """What a reader must know: no baseline, divergence and its reason, a precision that did not take effect."""
    lines = []
    if group.baseline is None:
        wanted = group.rows[0].baseline
        name = "FP32" if wanted == "fp32" else wanted
        lines.append(f"no {name} baseline with this key: delta empty ({' | '.join(row.folders for row in group.rows)})")
    if beside := sum(row.beside or 0 for row in group.rows):
        of = sum((row.finished or 0) + (row.diverged or 0) for row in group.rows)
        lines.append(f"{beside} of {of} runs shared their CPUs with another run: their throughput has no ratio")
    for row in group.rows:
        if row.diverged:
            lines.append(f"{_name(row)}: {row.status}: {row.reason}")
        if row.pairs is not None and row.pairs != row.finished:
            lines.append(
                f"{_name(row)}: compared over the {row.pairs} of its {row.finished} seeds that {row.baseline} has"
            )
        if row.precision.startswith(("fp16", "bf16")) and row.matmul == "float32":
            lines.append(f"{_name(row)}: its matrix products ran in float32")
        if row.precision.startswith("fp8") and "float8" not in row.matmul:
            lines.append(f"{_name(row)}: none of its layers multiplies in FP8; its products ran in {row.matmul}")
    return lines


def _name(row: Row) -> str:
    return f"{row.precision}, scale {row.scale}"


def excluded_line(row: Row) -> str:
    """Folder, what is known of the run, and the reason."""
    named = {"recipe": row.recipe, "precision": row.precision, "scale": row.scale, "seed": row.seeds}
    run = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    return f"{row.status}: {row.folders}{f' ({run})' if run else ''}: {row.reason}"


def apart(table: Table) -> list[str]:
    """For groups of a recipe that differ in few fields: which these are, each said once with all its values."""
    by_recipe: dict[str, list[dict[str, Any]]] = {}
    for group in table.groups:
        by_recipe.setdefault(group.rows[0].recipe, []).append(group.key)
    notes = [note for recipe, keys in by_recipe.items() for note in _apart(recipe, keys)]
    hidden = len(notes) - MOST_NOTES
    return notes if hidden <= 0 else [*notes[:MOST_NOTES], f"and {hidden} more such differences"]


def _apart(recipe: str, keys: list[dict[str, Any]]) -> list[str]:
    values: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for number, key in enumerate(keys[1:], start=1):
        nearest = min(keys[max(0, number - LOOKED_BACK) : number], key=lambda other: len(_differing(key, other)))
        names = _differing(key, nearest)
        if len(names) > FEW:
            continue
        seen = values.setdefault(names, {name: [] for name in names})
        for name in names:
            for value in (str(nearest.get(name, "unset")), str(key.get(name, "unset"))):
                if value not in seen[name]:
                    seen[name].append(value)
    notes = []
    for fields in values.values():
        listed = "; ".join(f"{name} {_and(words)}" for name, words in fields.items())
        notes.append(f"{recipe}: {listed} are not compared with each other")
    return notes


def _differing(one: dict[str, Any], other: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in {**one, **other} if one.get(name) != other.get(name))


def _and(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
