"""Prints the certificate's table as Markdown: `python -m tests.certificate [PROGRAM ...]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby

from tests.certificate.harness import Servers, Verdict, certify, pairs, why_impossible
from tests.certificate.programs import PROGRAMS
from tests.certificate.recorders import RECORDERS

OURS = [recorder.name for recorder in RECORDERS.values() if recorder.base]


def cell(verdict: Verdict | None) -> str:
    """Return what the table says of a pair."""
    if verdict is None:
        return "–"
    if verdict.failed:
        return "**failed**"
    if verdict.broken:
        return f"**{', '.join(f'{part.kind} {part.count:,}' for part in verdict.broken)}**"
    if verdict.refused:
        return "refused"
    counts = {part.kind: part.count for part in verdict.by_design}
    if not counts:
        return "same"
    peak = f"{counts['allocations']:+,} B" if counts.get("allocations") else ""
    ran = f"{counts['dynamo']:,} of dynamo's counts" if "dynamo" in counts else ""
    return ", ".join(part for part in ("same*", peak, ran) if part)


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines of the table, by kinds of programs."""
    known = {(verdict.program, verdict.recorder): verdict for verdict in verdicts}
    names = [name for name in PROGRAMS if any(program == name for program, _ in known)]
    lines = [f"| program | {' | '.join(OURS)} |", f"|---|{'---|' * len(OURS)}"]
    for kind, members in groupby(names, key=lambda name: PROGRAMS[name].kind):
        lines.append(f"| **{kind}** |{' |' * len(OURS)}")
        lines += [
            f"| {name} | {' | '.join(cell(known.get((name, ours))) for ours in OURS)} |" for name in members
        ]
    return lines


def main(chosen: Sequence[str]) -> int:
    """Print the table and what broke. Return 1 if anything did."""
    if why_impossible():
        sys.exit(why_impossible())
    with Servers() as servers:
        verdicts = list(certify(pairs(list(chosen) or list(PROGRAMS), OURS), servers))
    broken = [verdict for verdict in verdicts if verdict.broken or verdict.failed]
    count = f"{len(verdicts)} pairs of a program and a recorder, {len(verdicts) - len(broken)} as promised."
    sys.stdout.write("\n".join([count, "", *table(verdicts), ""]))
    for verdict in broken:
        for text in (
            [verdict.failed] if verdict.failed else [f"{part.kind}: {part.text}" for part in verdict.broken]
        ):
            sys.stderr.write(f"\n{verdict.program}, {verdict.recorder}: {text}\n")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
