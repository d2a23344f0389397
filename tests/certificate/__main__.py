"""Prints the certificate's table as Markdown: `python -m tests.certificate [--device cuda] [PROGRAM ...]`."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from tests.certificate.harness import Servers, Verdict, certify, pairs, why_impossible
from tests.certificate.programs import PROGRAMS
from tests.certificate.recorders import NOTHING, RECORDERS

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


def comparable(verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """Yield the verdicts on the programs that run on the GPU, twice in the same way; print which do not."""
    for why, names in (
        ("do not run there", {verdict.program: verdict.raised for verdict in verdicts if verdict.raised}),
        (
            "are not the same twice",
            {
                verdict.program: verdict.failed or " ".join(part.kind for part in verdict.broken)
                for verdict in verdicts
                if verdict.recorder == NOTHING and not verdict.raised and (verdict.broken or verdict.failed)
            },
        ),
    ):
        sys.stdout.write(f"{len(names)} programs {why}:\n")
        sys.stdout.writelines(f"- {name}: {text}\n" for name, text in names.items())
        verdicts = [verdict for verdict in verdicts if verdict.program not in names]
    programs = Counter(verdict.program for verdict in verdicts)
    sys.stdout.write(f"{len(programs)} programs are compared.\n\n")
    yield from (verdict for verdict in verdicts if verdict.recorder != NOTHING)


def main(arguments: Sequence[str]) -> int:
    """Print the table and what broke. Return 1 if anything did."""
    parser = argparse.ArgumentParser(prog="python -m tests.certificate")
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help="all of them, if none is named")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are created")
    options = parser.parse_args(arguments)
    if why_impossible():
        sys.exit(why_impossible())
    recorders = [*OURS, NOTHING] if options.device == "cuda" else OURS
    with Servers(device=options.device) as servers:
        verdicts = []
        for verdict in certify(pairs(options.programs or list(PROGRAMS), recorders), servers):
            sys.stderr.write(f"{verdict.program}, {verdict.recorder}: {cell(verdict)}\n")
            verdicts.append(verdict)
    if options.device == "cuda":
        verdicts = list(comparable(verdicts))
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
