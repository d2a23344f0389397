/** The Modules table's rows: a tree of modules with repeated siblings folded, sorted and filtered. */
import type { Categories, ModuleRow } from "../api/types";
import { added, total } from "./categories";
import { FEWEST, inRows } from "./folding";

export interface ModuleNode {
  /** Unique within one tree; stays the same when the table is sorted or filtered. */
  id: string;
  /** What the row prints, e.g. "blocks.0" or "blocks". */
  label: string;
  /** Number of layers in a folded row, else null. */
  layers: number | null;
  key: string;
  kind: ModuleRow["kind"];
  className: string | null;
  /** The bytes of this row: inclusive in a tree, its own in a flat list. */
  bytes: number;
  atPeak: Categories;
  /** At the row's own highest moment in the step; of a folded row, at that of the layer that is highest. */
  highest: Categories;
  highestNs: number | null;
  /** The calls with the highest allocated on the device; of a folded row, those of all its layers. */
  inForward: ModuleRow["highest_in_forward"];
  inBackward: ModuleRow["highest_in_backward"];
  calls: number;
  allocations: number;
  allocatedBytes: number;
  forwardNs: number;
  backwardNs: number;
  children: ModuleNode[];
}

/** The roots of the tree; with `fold`, equal numbered siblings stand under one row. */
export function buildTree(rows: ModuleRow[], fold: boolean): ModuleNode[] {
  const nodes = new Map<number, ModuleNode>();
  const roots: ModuleNode[] = [];
  for (const row of rows) {
    const node = treeNode(row);
    nodes.set(row.id, node);
    const parent = row.parent === null ? undefined : nodes.get(row.parent);
    (parent ? parent.children : roots).push(node);
  }
  if (!fold) return roots;
  for (const node of nodes.values()) foldChildren(node);
  return foldOutside(roots);
}

/** Fewest operators outside of all modules that make a row of their own. */
const FEWEST_OUTSIDE = 4;

/** What no module owns, an operator a row, stands under one row after the modules. */
function foldOutside(roots: ModuleNode[]): ModuleNode[] {
  const outside = roots.filter((node) => node.kind === "outside");
  if (outside.length < FEWEST_OUTSIDE || outside.length === roots.length) return roots;
  const folded = { ...together("outside:", outside), label: "outside modules", className: null };
  return [...roots.filter((node) => node.kind !== "outside"), folded];
}

/** What an open row holds beyond the rows inside it; null where these sum to it. */
export function ownPart(node: ModuleNode): ModuleNode | null {
  const rest = (of: (one: ModuleNode) => number): number =>
    node.children.reduce((left, child) => left - of(child), of(node));
  if (rest((one) => one.bytes) === 0 && rest((one) => one.allocations) <= 0) return null;
  const atPeak: Categories = {};
  for (const key of Object.keys(node.atPeak)) atPeak[key] = rest((one) => one.atPeak[key] ?? 0);
  return {
    ...node,
    id: `o${node.id}`,
    label: "itself",
    layers: null,
    bytes: rest((one) => one.bytes),
    atPeak,
    highest: {},
    highestNs: null,
    inForward: null,
    inBackward: null,
    allocations: rest((one) => one.allocations),
    allocatedBytes: rest((one) => one.allocatedBytes),
    forwardNs: 0,
    backwardNs: 0,
    children: [],
  };
}

/** Every module by its own bytes, so that the rows sum to the peak; with `fold`, layers in one row. */
export function buildFlat(rows: ModuleRow[], fold: boolean): ModuleNode[] {
  const nodes = rows.map((row) => ({ ...treeNode(row), bytes: row.own_bytes, atPeak: row.own }));
  if (!fold) return nodes;
  return inRows(nodes).flatMap(([key, row]) =>
    byClass(row).map((group) => (group.length === 1 ? group[0]! : together(key, group))),
  );
}

/** Of one row, those that are of one class; where they differ, a row of its own for each class. */
function byClass(nodes: readonly ModuleNode[]): ModuleNode[][] {
  const groups = new Map<string, ModuleNode[]>();
  for (const node of nodes) {
    const group = groups.get(node.className ?? "");
    if (group) group.push(node);
    else groups.set(node.className ?? "", [node]);
  }
  return [...groups.values()];
}

function treeNode(row: ModuleRow): ModuleNode {
  return {
    id: `m${row.id}`,
    label: row.key,
    layers: null,
    key: row.key,
    kind: row.kind,
    className: row.class_name,
    bytes: row.inclusive_bytes,
    atPeak: row.inclusive,
    highest: row.highest ?? {}, // not known without the side file
    highestNs: row.highest_ns,
    inForward: row.highest_in_forward,
    inBackward: row.highest_in_backward,
    calls: row.calls,
    allocations: row.allocations,
    allocatedBytes: row.allocated_bytes,
    forwardNs: row.forward_ns,
    backwardNs: row.backward_ns,
    children: [],
  };
}

/** Fewest layers with nothing inside them that stand in one row, where all of their list are alike. */
const FEWEST_BARE = 4;

/** Of one class, and with as many bytes of parameters: a Sequential's layers may differ in either. */
function areAlike(layers: readonly ModuleNode[]): boolean {
  const kind = ({ className, atPeak }: ModuleNode): string => `${atPeak["parameter"] ?? 0} ${className ?? ""}`;
  return new Set(layers.map(kind)).size === 1;
}

/** Numbered siblings of one class become one row; where they are all there is, their parent is that row. */
function foldChildren(parent: ModuleNode): void {
  const layers = parent.children.filter((child) => child.kind === "module" && /(^|\.)[0-9]{1,9}$/.test(child.key));
  const deep = layers.some((layer) => layer.children.length > 0);
  if (layers.length < (deep ? FEWEST : FEWEST_BARE) || !(deep || areAlike(layers))) return;
  for (const group of byClass(layers)) {
    if (group.length < 2) continue;
    if (group.length === parent.children.length && parent.calls === 0) parent.layers = group.length;
    else replaceWithFold(parent, group);
  }
}

function replaceWithFold(parent: ModuleNode, group: ModuleNode[]): void {
  const inGroup = new Set(group);
  const at = parent.children.indexOf(group[0]!);
  const folded = together(group[0]!.key.replace(/[0-9]+$/, "*"), group);
  const rest = parent.children.filter((child) => !inGroup.has(child));
  parent.children = [...rest.slice(0, at), folded, ...rest.slice(at)];
}

/** One row for several, with their sums; what is highest is that of one of them, as each has its own moment. */
export function together(key: string, group: ModuleNode[]): ModuleNode {
  const sum = (of: (node: ModuleNode) => number) => group.reduce((s, node) => s + of(node), 0);
  const most = (of: (node: ModuleNode) => number): ModuleNode =>
    group.reduce((top, node) => (of(node) > of(top) ? node : top), group[0]!);
  const { highest, highestNs } = most((node) => total(node.highest));
  return {
    ...group[0]!,
    id: `f${group[0]!.id}`,
    label: key,
    key,
    layers: group.length,
    bytes: sum((node) => node.bytes),
    atPeak: group.reduce<Categories>((s, node) => added(s, node.atPeak), {}),
    highest,
    highestNs,
    inForward: most((node) => node.inForward?.bytes ?? -1).inForward,
    inBackward: most((node) => node.inBackward?.bytes ?? -1).inBackward,
    calls: sum((node) => node.calls),
    allocations: sum((node) => node.allocations),
    allocatedBytes: sum((node) => node.allocatedBytes),
    forwardNs: sum((node) => node.forwardNs),
    backwardNs: sum((node) => node.backwardNs),
    children: group,
  };
}
