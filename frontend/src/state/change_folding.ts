/** Changes of repeated layers in one row, so that twelve equal changes read as one. */
import type { CompareRow, Status } from "../api/types";
import { inLayers, inRows } from "./folding";

export interface FoldedChange extends CompareRow {
  /** The rows inside, in the table's order; empty where nothing was folded. */
  members: CompareRow[];
}

export function foldChanges(rows: CompareRow[]): FoldedChange[] {
  return inOrder(inRows(rows));
}

/** What an opened row shows: its layers, each a row that may be opened again. */
export function openedChange(row: FoldedChange): FoldedChange[] {
  return inOrder(inLayers(row.members));
}

function inOrder(rows: [string, CompareRow[]][]): FoldedChange[] {
  return rows
    .map(([key, group]) => (group.length === 1 ? unfolded(group[0]!) : together(key, group)))
    .sort(
      (a, b) =>
        Math.abs(b.delta_bytes) - Math.abs(a.delta_bytes) ||
        b.other_bytes + b.base_bytes - a.other_bytes - a.base_bytes,
    );
}

export function unfolded(row: CompareRow): FoldedChange {
  return { ...row, members: [] };
}

function together(key: string, group: CompareRow[]): FoldedChange {
  const sum = (of: (row: CompareRow) => number): number => group.reduce((s, row) => s + of(row), 0);
  const delta = sum((row) => row.delta_bytes);
  return {
    key,
    status: statusOf(group, delta),
    base_bytes: sum((row) => row.base_bytes),
    other_bytes: sum((row) => row.other_bytes),
    delta_bytes: delta,
    base_count: sum((row) => row.base_count),
    other_count: sum((row) => row.other_count),
    category: delta === 0 ? null : mostOf(group, Math.sign(delta)),
    members: group,
  };
}

/** Of the layers' categories the one that moved most, in the direction in which the group moved. */
function mostOf(group: CompareRow[], direction: number): string | null {
  const moved = new Map<string | null, number>();
  for (const row of group) moved.set(row.category, (moved.get(row.category) ?? 0) + direction * row.delta_bytes);
  return [...moved].reduce((top, one) => (one[1] > top[1] ? one : top))[0];
}

/** One word for the whole group: added or removed only where that is true of every layer. */
function statusOf(group: CompareRow[], delta: number): Status {
  const first = group[0]!.status;
  if (group.every((row) => row.status === first)) return first;
  return delta > 0 ? "grown" : delta < 0 ? "shrunk" : "same";
}
