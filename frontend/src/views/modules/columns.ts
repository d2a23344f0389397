/** The columns of the Modules table: what each shows, and how it sorts. */
import type { Categories, ModuleRow } from "../../api/types";
import { GROUPS, groupBytes, total } from "../../state/categories";
import type { ModuleNode } from "../../state/module_tree";

export type At = "peak" | "highest";

export interface Column {
  id: string;
  label: string;
  title: string;
  kind: "bytes" | "count" | "time";
  /** CSS pixels: its head in one line, or in two words. */
  width: number;
  /** Shaded by its share of the column's largest. */
  heat: boolean;
  value: (node: ModuleNode, at: At) => number | null;
  /** The call that a number is about; a click on it shows that call in the Timeline. */
  call?: (node: ModuleNode) => ModuleRow["highest_in_forward"];
}

export function categoriesAt(node: ModuleNode, at: At): Categories {
  return at === "highest" ? node.highest : node.atPeak;
}

const AT_PEAK: Column = {
  id: "bytes",
  width: 82,
  label: "at peak",
  title: "Bytes alive at the step's peak",
  kind: "bytes",
  heat: false,
  value: (n) => n.bytes,
};

const REST: readonly Column[] = [
  ...GROUPS.map((group): Column => ({
    id: group.id,
    label: group.label,
    title: group.members.map((m) => m.replaceAll("_", " ")).join(", "),
    kind: "bytes",
    width: { other: 60, temporaries: 86, gradients: 76, optimizer: 76 }[group.id] ?? 80,
    heat: true,
    value: (n, at) => groupBytes(categoriesAt(n, at), group),
  })),
  {
    id: "in-forward",
    width: 78,
    label: "highest in forward",
    title: "Highest allocated on the device while a forward call of it ran; click to see that call",
    kind: "bytes",
    heat: false,
    value: (n) => n.inForward?.bytes ?? null,
    call: (n) => n.inForward,
  },
  {
    id: "in-backward",
    width: 80,
    label: "highest in backward",
    title: "Highest allocated on the device while a backward call of it ran; click to see that call",
    kind: "bytes",
    heat: false,
    value: (n) => n.inBackward?.bytes ?? null,
    call: (n) => n.inBackward,
  },
  {
    id: "allocations",
    width: 86,
    label: "allocations",
    title: "Allocations made in this step",
    kind: "count",
    heat: false,
    value: (n) => n.allocations,
  },
  {
    id: "forward",
    width: 72,
    label: "forward",
    title: "Time in its forward calls",
    kind: "time",
    heat: false,
    value: (n) => n.forwardNs,
  },
  {
    id: "backward",
    width: 76,
    label: "backward",
    title: "Time in its backward calls",
    kind: "time",
    heat: false,
    value: (n) => n.backwardNs,
  },
];

/** By the moment that the table is of. */
export const COLUMNS: Record<At, readonly Column[]> = {
  peak: [AT_PEAK, ...REST],
  highest: [
    { ...AT_PEAK, label: "highest", title: "Its most bytes at any moment of the step", value: (n) => total(n.highest) },
    { id: "when", width: 72, label: "when", title: "Time from the step's start", kind: "time", heat: false, value: (n) => n.highestNs },
    ...REST,
  ],
};

/** Those with a value in any row, closed ones included. */
export function columnsOf(roots: ModuleNode[], at: At): Column[] {
  const known = (nodes: ModuleNode[], column: Column): boolean =>
    nodes.some((node) => isKnown(column, column.value(node, at)) || known(node.children, column));
  return COLUMNS[at].filter((column) => known(roots, column));
}

/** A duration of 0 says that none was recorded; "when" is a moment. */
export function isKnown({ id, kind }: Column, value: number | null): value is number {
  return value !== null && (value !== 0 || kind !== "time" || id === "when");
}

export interface Sorting {
  id: string;
  descending: boolean;
}

/** "bytes" sorts downwards, "-bytes" upwards, "model" keeps the model's order. */
export function readSorting(text: string | undefined, at: At): Sorting | null {
  if (text === "model") return null;
  const id = (text ?? "bytes").replace(/^-/, "");
  const known = id === "name" || COLUMNS[at].some((c) => c.id === id);
  return known ? { id, descending: !(text ?? "").startsWith("-") } : { id: "bytes", descending: true };
}

/** A click on a column: downwards, upwards, the model's order. Names start upwards. */
export function nextSorting(now: Sorting | null, id: string): string {
  const first = id === "name" ? "-name" : id;
  const second = id === "name" ? "name" : `-${id}`;
  if (!now || now.id !== id) return first;
  const current = now.descending ? id : `-${id}`;
  return current === first ? second : "model";
}
