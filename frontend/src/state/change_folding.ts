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
    label: key,
    status: statusOf(group, delta),
    base_bytes: sum((row) => row.base_bytes),
    other_bytes: sum((row) => row.other_bytes),
    delta_bytes: delta,
    base_count: sum((row) => row.base_count),
    other_count: sum((row) => row.other_count),
    ...(delta === 0 ? { category: null, category_delta_bytes: 0 } : mostOf(group, Math.sign(delta))),
    members: group,
  };
}

/** Of the layers' categories the one that moved most, in the direction in which the group moved. */
function mostOf(group: CompareRow[], direction: number): Pick<CompareRow, "category" | "category_delta_bytes"> {
  const moved = new Map<string | null, number>();
  for (const row of group) moved.set(row.category, (moved.get(row.category) ?? 0) + row.category_delta_bytes);
  const [category, bytes] = [...moved].reduce((top, one) => (direction * one[1] > direction * top[1] ? one : top));
  return { category, category_delta_bytes: bytes };
}

/** The category that makes up most of a change; null where none does, and where it is not known. */
export function mainCategory({ category, category_delta_bytes, delta_bytes }: CompareRow): string | null {
  return category_delta_bytes / delta_bytes > 0.5 ? category : null;
}

/** One word for the whole group: added or removed only where that is true of every layer. */
function statusOf(group: CompareRow[], delta: number): Status {
  const first = group[0]!.status;
  if (group.every((row) => row.status === first)) return first;
  return delta > 0 ? "grown" : delta < 0 ? "shrunk" : "same";
}
