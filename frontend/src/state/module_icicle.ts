/** The modules as a tree of bars: widths in columns, repeated layers as one bar, and the way to a bar. */
import type { Categories } from "../api/types";
import { added, total } from "./categories";
import { moduleLabel } from "./names";
import { type ModuleNode, together } from "./module_tree";

/** Columns of one length, parents first, in the model's order. Place 0 is all memory. */
export interface Icicle {
  id: number[];
  parent: number[];
  bytes: number[];
  /** What it is made of; these sum to its bytes. */
  categories: Categories[];
  node: (ModuleNode | null)[];
  /** What it goes by in the address; each once. */
  key: string[];
  /** What its bar says: what the one above does not. */
  name: string[];
}

const ALL = "all memory";
const ROOT = "(root)";

/** Lays out a tree at the peak: modules have their highest at different moments, so none are parts of one whole there. */
export function icicleOf(roots: readonly ModuleNode[]): Icicle {
  const all = roots.reduce<Categories>((sum, node) => added(sum, node.atPeak), {});
  const found: Icicle = { id: [0], parent: [-1], bytes: [total(all)], categories: [all], node: [null], key: [""], name: [ALL] };
  const taken = new Set([""]);
  const place = (node: ModuleNode, parent: number): void => {
    const at = found.id.length;
    const above = found.node[parent]?.key;
    found.id.push(at);
    found.parent.push(parent);
    found.bytes.push(total(node.atPeak));
    found.categories.push(node.atPeak);
    found.node.push(node);
    found.key.push(unique(node, taken));
    found.name.push(barName(node, above));
    node.children.forEach((child) => place(child, at));
  };
  roots.forEach((node) => place(node, 0));
  return found;
}

function unique(node: ModuleNode, taken: Set<string>): string {
  let key = node.key === "" ? ROOT : node.key;
  while (taken.has(key)) key += `·${node.className ?? taken.size}`;
  taken.add(key);
  return key;
}

function barName(node: ModuleNode, above: string | undefined): string {
  const own = node.kind === "module" ? within(node.label, above).replace(/^(\*\.)+/, "") : node.label;
  const name = moduleLabel(own);
  return node.layers === null ? name : `${name} ×${node.layers}`;
}

/** `attn` of `blocks.0.attn` within `blocks.0`. */
function within(key: string, above: string | undefined): string {
  return above && key.startsWith(`${above}.`) ? key.slice(above.length + 1) : key;
}

/** From all memory down to a place. */
export function wayTo(parent: readonly number[], place: number): number[] {
  const way: number[] = [];
  for (let at = place; at >= 0; at = parent[at]!) way.unshift(at);
  return way;
}

/** A tree with folded layers, in which each folded row holds what one layer holds, summed over all of them. */
export function layersAsOne(nodes: readonly ModuleNode[]): ModuleNode[] {
  return nodes.map((node) => ({ ...node, children: inside([node], node.key) }));
}

function isFolded(node: ModuleNode): boolean {
  return node.layers !== null && node.kind === "module";
}

/** What is inside nodes that stand as one under a key, each part once. */
function inside(nodes: readonly ModuleNode[], key: string): ModuleNode[] {
  let parents = nodes;
  let above = key;
  while (parents.some(isFolded)) {
    if (parents !== nodes || !key.endsWith("*")) above += ".*";
    parents = parents.flatMap((node) => (isFolded(node) ? node.children : [node]));
  }
  const groups = new Map<string, { part: string; members: ModuleNode[] }>();
  for (const parent of parents)
    for (const child of parent.children) {
      const part = within(child.key, parent.key);
      const group = groups.get(`${part}\n${child.className}`);
      if (group) group.members.push(child);
      else groups.set(`${part}\n${child.className}`, { part, members: [child] });
    }
  return [...groups.values()].map(({ part, members }) => {
    const first = members[0]!;
    if (parents.length === 1) return { ...first, children: inside(members, first.key) };
    const one = together(`${above}.${part}`, members);
    const layers = members.reduce((sum, node) => sum + (node.layers ?? 1), 0);
    return { ...one, layers, children: inside(members, one.key) };
  });
}
