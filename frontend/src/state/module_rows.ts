/** Which rows of a module tree a table shows: what is open, what matches, in which order. */
import { type ModuleNode, ownPart } from "./module_tree";

export interface VisibleRow {
  node: ModuleNode;
  depth: number;
  open: boolean;
  /** What the row above holds itself, so that the rows inside it sum to it. */
  own?: true;
}

export interface Order {
  value: (node: ModuleNode) => number | string;
  descending: boolean;
}

/** A filter as people type it: a part of the name, or with * and ? a pattern for all of it. */
export function matcher(filter: string): ((node: ModuleNode) => boolean) | null {
  const wanted = filter.trim().toLowerCase();
  if (wanted === "") return null;
  if (!/[*?]/.test(wanted)) {
    return (node) => node.key.toLowerCase().includes(wanted) || (node.className ?? "").toLowerCase().includes(wanted);
  }
  return (node) => wildcard(wanted, node.key.toLowerCase()) || wildcard(wanted, (node.className ?? "").toLowerCase());
}

/** Whether the pattern covers the whole text; linear, so that no pattern can hang the page. */
export function wildcard(pattern: string, text: string): boolean {
  let p = 0;
  let t = 0;
  let star = -1;
  let mark = 0;
  while (t < text.length) {
    const c = pattern[p];
    if (c === "*") {
      star = p++;
      mark = t;
    } else if (c === "?" || (c !== undefined && c === text[t])) {
      p++;
      t++;
    } else if (star >= 0) {
      p = star + 1;
      t = ++mark;
    } else return false;
  }
  while (pattern[p] === "*") p++;
  return p === pattern.length;
}

/** The rows from top to bottom. With a filter, every match and the way to it is shown, whatever is closed. */
export function visibleRows(
  roots: ModuleNode[],
  isOpen: (node: ModuleNode, depth: number) => boolean,
  order: Order | null,
  filter: ((node: ModuleNode) => boolean) | null,
  withOwn = false,
): VisibleRow[] {
  const keep = filter ? matching(roots, filter) : null;
  const rows: VisibleRow[] = [];
  const walk = (nodes: ModuleNode[], depth: number): void => {
    for (const node of sorted(nodes, order)) {
      if (keep && !keep.has(node)) continue;
      const below = keep !== null && node.children.some((child) => keep.has(child));
      const open = node.children.length > 0 && (below || isOpen(node, depth));
      rows.push({ node, depth, open });
      if (!open) continue;
      const own = withOwn && !keep ? ownPart(node) : null;
      if (own) rows.push({ node: own, depth: depth + 1, open: false, own: true });
      walk(node.children, depth + 1);
    }
  };
  walk(roots, 0);
  return rows;
}

/** How many rows match, and their bytes together; what lies inside a match is counted but not summed twice. */
export function matches(roots: ModuleNode[], filter: (node: ModuleNode) => boolean): { count: number; bytes: number } {
  let [count, bytes] = [0, 0];
  const visit = (node: ModuleNode, inside: boolean): void => {
    const hit = filter(node);
    if (hit) count += 1;
    if (hit && !inside) bytes += node.bytes;
    for (const child of node.children) visit(child, inside || hit);
  };
  for (const node of roots) visit(node, false);
  return { count, bytes };
}

function matching(roots: ModuleNode[], filter: (node: ModuleNode) => boolean): Set<ModuleNode> {
  const keep = new Set<ModuleNode>();
  const visit = (node: ModuleNode): boolean => {
    const below = node.children.map(visit).some(Boolean);
    if (below || filter(node)) keep.add(node);
    return keep.has(node);
  };
  roots.forEach(visit);
  return keep;
}

function sorted(nodes: ModuleNode[], order: Order | null): ModuleNode[] {
  if (!order || nodes.length < 2) return nodes;
  const sign = order.descending ? -1 : 1;
  return nodes
    .map((node) => ({ node, value: order.value(node) }))
    .sort((a, b) => sign * (a.value < b.value ? -1 : a.value > b.value ? 1 : 0))
    .map(({ node }) => node);
}
