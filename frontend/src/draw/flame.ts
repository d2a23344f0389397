/** The geometry of a flame graph that hangs from its root: pure numbers, no canvas. */
import { bisect } from "./bisect";

/** Columns of one length, parents first. `parent` is a place in them, -1 of the root; siblings stand as they are drawn. */
export interface Tree {
  id: number[];
  parent: number[];
  bytes: number[];
}

export interface Flame {
  /** Of each node, as shares of the width. */
  left: Float64Array;
  right: Float64Array;
  depth: Int32Array;
  /** Places of nodes by depth, from the left. What is neither above nor below the one looked at is in none. */
  levels: number[][];
}

/** What lies above the node that is looked at fills the whole width; below it, widths are bytes. */
export function layFlame(nodes: Tree, zoom: number): Flame {
  const count = nodes.id.length;
  const flame: Flame = {
    left: new Float64Array(count),
    right: new Float64Array(count),
    depth: new Int32Array(count),
    levels: [],
  };
  const at = Math.max(0, nodes.id.indexOf(zoom));
  const above = new Set<number>();
  for (let place = at; place >= 0; place = nodes.parent[place]!) above.add(place);
  const outside = new Set<number>();
  const next = new Float64Array(count); // where a node's next child begins
  const whole = nodes.bytes[at] || 1;
  for (let place = 0; place < count; place++) {
    const parent = nodes.parent[place]!;
    const full = above.has(place);
    if (!full && parent >= 0 && above.has(parent) && parent !== at) outside.add(place);
    if (outside.has(parent)) outside.add(place);
    const left = full || parent < 0 ? 0 : next[parent]!;
    const right = full ? 1 : left + nodes.bytes[place]! / whole;
    flame.left[place] = left;
    flame.right[place] = right;
    next[place] = left;
    if (parent >= 0 && !full) next[parent] = right;
    const depth = parent < 0 ? 0 : flame.depth[parent]! + 1;
    flame.depth[place] = depth;
    if (!outside.has(place)) (flame.levels[depth] ??= []).push(place);
  }
  for (const level of flame.levels) level.sort((a, b) => flame.left[a]! - flame.left[b]!);
  return flame;
}

/** The node under a point: its depth, and a share of the width. -1 where there is none. */
export function nodeAt(flame: Flame, depth: number, share: number): number {
  const level = flame.levels[depth];
  if (!level) return -1;
  const place = level[bisect(level.length, (i) => flame.right[level[i]!]! > share)];
  return place !== undefined && flame.left[place]! <= share ? place : -1;
}

/** Where an arrow key leads from a node: to its caller, its first callee, its neighbors at the same depth. */
export function neighbor(flame: Flame, nodes: Tree, from: number, key: string): number {
  if (from < 0) return 0;
  const level = flame.levels[flame.depth[from]!] ?? [];
  if (key === "ArrowUp") return Math.max(0, nodes.parent[from]!);
  if (key === "ArrowDown") return flame.levels[flame.depth[from]! + 1]?.find((p) => nodes.parent[p] === from) ?? from;
  const place = level.indexOf(from) + (key === "ArrowRight" ? 1 : -1);
  return level[place] ?? from;
}

/** A number from 0 to `tones` - 1 that a name always gets: frames of one file share a tone. */
export function toneOf(name: string, tones: number): number {
  let hash = 2166136261;
  for (let i = 0; i < Math.min(name.length, 400); i++) hash = Math.imul(hash ^ name.charCodeAt(i), 16777619);
  return (hash >>> 0) % tones;
}
