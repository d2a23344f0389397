/** What the moment at the cursor is held against: the marked one; else at the peak the base's peak, elsewhere the step's own. */
import { address } from "../../api/request";
import { type Remote, useRemote } from "../../api/remote";
import type { CompareAnswer, LabeledPart, MomentAnswer } from "../../api/types";
import { base, isAlone, picked, route } from "../../state/app";
import { deltasTo, type PartChanges, partChanges } from "../../state/part_changes";
import { runName } from "../../state/run_name";
import type { Pick } from "../../state/selection";
import { sideName } from "../../state/sentences";
import type { Cursor } from "./cursor";

export interface Change extends PartChanges {
  /** What it is held against, whole and for the head of a column. */
  against: string;
  short: string;
}

/** Null where there is nothing to hold it against; without numbers until all parts (not null) and theirs are known. */
export function useChange(
  by: string,
  parts: LabeledPart[] | null,
  cursor: Cursor,
  alone: boolean,
): Change | null {
  const pick = picked.value!;
  const { mark } = cursor;
  const basis = alone || mark || !cursor.atPeak ? null : meant(base.value, pick);
  const folding = cursor.groups.size > 0 ? cursor.folding : {};
  const query = basis && {
    base_run: basis.run,
    base_worker: basis.worker,
    base_step: basis.step,
    base_device: basis.device,
  };
  const compared = useRemote<CompareAnswer>(query ? address("compare", { by, ...pick, ...folding, ...query }) : null);
  const peak = useRemote<MomentAnswer>(cursor.atPeak || mark ? null : cursor.peakPath);
  if (basis && !compared.failure) {
    const deltas = compared.data && new Map(compared.data.rows.map((row) => [row.key, row.delta_bytes]));
    const against = sideName({ ...basis, alone: isAlone(basis) }, pick);
    return { ...changesOf(deltas), against, short: basis.run === pick.run ? against : lastPart(basis.run, pick.run) };
  }
  if (mark) return { ...changesOf(deltasFrom(mark.moment, parts, by)), against: "the marked moment", short: "mark" };
  if (cursor.atPeak || cursor.peakPath === null || peak.failure) return null;
  return { ...changesOf(deltasFrom(peak, parts, by)), against: "the peak", short: "peak" };
}

/** Undefined until both moments are known. */
function deltasFrom({ data, stale }: Remote<MomentAnswer>, parts: LabeledPart[] | null, by: string) {
  return parts && data && !stale ? deltasTo(parts, partsOf(data, by)) : undefined;
}

/** A run's own name, without the folders that it shares with the other. */
function lastPart(run: string, other: string): string {
  const [own, others] = [runName(run).split("/").at(-1)!, other.split("/").at(-1)!];
  return own === others ? runName(run) : own;
}

function changesOf(deltas: ReadonlyMap<string, number> | undefined): PartChanges {
  return deltas ? partChanges(deltas) : { of: () => undefined, rest: () => 0, gone: () => [] };
}

/** A moment divided as it was asked for. */
export function partsOf(moment: MomentAnswer, by: string): LabeledPart[] {
  if (moment.parts) return moment.parts;
  const parts = by === "phase" ? moment.by_phase : moment.by_category;
  return parts.map((part) => ({ ...part, label: part.key }));
}

/** Another run is held against this one only where someone asked for it. */
function meant(basis: Pick | null, pick: Pick): Pick | null {
  return basis && (basis.run === pick.run || route.value.base_run !== undefined) ? basis : null;
}
