import { useEffect, useState } from "preact/hooks";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { AdviceAnswer, Finding, FleetRun } from "../../api/types";
import { titleOf } from "../../state/advice";
import { asPartOf, exactBytes } from "../../state/bytes";
import { causeOf } from "../../state/fleet";
import { titleText } from "../../state/names";
import { RouteLink } from "../route_link";
import { Sentence } from "../sentence";

/** By run, its first finding; null where Advice finds nothing. */
export type Findings = ReadonlyMap<string, Finding | null | "not judged">;

/** Asks Advice for runs without a cause, one after the other: its rules read all events of a window. */
export function useFindings(rows: FleetRun[], on: boolean): Findings {
  const [known, learn] = useState<Findings>(new Map());
  const next = on ? rows.find((row) => causeOf(row) === null && !known.has(keyOf(row))) : undefined;
  const answer = useRemote<AdviceAnswer>(next ? address("advice", placeOf(next)) : null);
  const { data, failure } = answer;
  useEffect(() => {
    if (!next || !(data || failure)) return;
    learn(new Map(known).set(keyOf(next), failure ? "not judged" : (data!.findings[0] ?? null)));
  }, [data, failure]);
  return known;
}

/** A step more is another recording. */
export function keyOf({ run, step, last }: FleetRun): string {
  return JSON.stringify([run, step, last]);
}

function placeOf({ run, worker, device, step }: FleetRun) {
  return { run, worker, device, step };
}

/** The first finding of a run, and the way to its Advice; empty while it is asked for. */
export function FirstFinding({ row, finding }: { row: FleetRun; finding: Finding | null | "not judged" | undefined }) {
  if (finding === undefined) return <span aria-busy="true" />;
  if (finding === null || finding === "not judged") return <span class="muted">{finding ?? "nothing found"}</span>;
  const { bytes, of_bytes, measure, title } = finding;
  return (
    <RouteLink
      to={{ view: "advice", ...placeOf(row), step: String(row.step) }}
      class="plain-link"
      title={`${titleText(title)} ${exactBytes(bytes)} ${measure}`}
      testid="fleet-finding"
    >
      <span class="finding-bytes">
        {asPartOf(of_bytes, bytes)} {measure}:
      </span>{" "}
      <span class="muted">
        <Sentence pieces={titleOf(finding)} />
      </span>
    </RouteLink>
  );
}
