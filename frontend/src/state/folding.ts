/**
 * Layers that repeat fold into one row: blocks.0.mlp and blocks.1.mlp become blocks.*.mlp. The Timeline's groups keep
 * the same rule in Python (analysis/folded_layers.py); tests/analysis/folded_layers.json holds the two together.
 */
import type { Categories, Part } from "../api/types";
import { added } from "./categories";

export interface FoldedPart {
  /** The key, or the pattern with * where the layers differ. */
  key: string;
  bytes: number;
  count: number;
  categories: Categories;
  /** The parts inside, largest first; one where nothing was folded. */
  members: Part[];
}

/** Fewest layers with something inside them that fold, and fewest bare ones: net.0 and net.2 are often unlike. */
const FEWEST_DEEP = 2;
const FEWEST_BARE = 4;

interface Numbered {
  /** What stands before the first number: where the layers are listed. */
  list: string;
  layer: number;
  /** What stands behind it, with its dot. */
  inside: string;
}

/** The first segment that is a number, and what stands about it; null where there is none. */
function numbered(key: string): Numbered | null {
  if (key.startsWith("outside:")) return null;
  const found = /^((?:[^.]*\.)*?)([0-9]{1,9})(\..*)?$/s.exec(key);
  return found && { list: found[1]!, layer: Number(found[2]), inside: found[3] ?? "" };
}

/** How many layers of a list it takes to fold them, by whether any has something inside. */
export function fewestLayers(deep: boolean): number {
  return deep ? FEWEST_DEEP : FEWEST_BARE;
}

/** The row of each key: its pattern where at least two keys share one, else the key itself. */
export function foldedKeys(keys: readonly string[]): string[] {
  const found = keys.map(numbered);
  const lists = new Map<string, { layers: Set<number>; deep: boolean }>();
  for (const one of found) {
    if (!one) continue;
    const list = lists.get(one.list) ?? { layers: new Set(), deep: false };
    list.layers.add(one.layer);
    list.deep ||= one.inside !== "";
    lists.set(one.list, list);
  }
  const starred = keys.map((key, i) => {
    const one = found[i];
    const list = one && lists.get(one.list)!;
    return list && list.layers.size >= fewestLayers(list.deep) ? `${one.list}*${one.inside}` : key;
  });
  const times = new Map<string, number>();
  for (const row of starred) times.set(row, (times.get(row) ?? 0) + 1);
  return starred.map((row, i) => (times.get(row)! > 1 ? row : keys[i]!));
}

/** The things of each row, rows in the order of their first thing. */
export function inRows<T extends { key: string }>(things: readonly T[]): [string, T[]][] {
  const rows = new Map<string, T[]>();
  foldedKeys(things.map((thing) => thing.key)).forEach((row, i) => {
    const group = rows.get(row);
    if (group) group.push(things[i]!);
    else rows.set(row, [things[i]!]);
  });
  return [...rows];
}

export function foldParts(parts: Part[]): FoldedPart[] {
  return inRows(parts)
    .map(([key, group]) => together(key, group))
    .sort((a, b) => b.bytes - a.bytes);
}

function together(key: string, group: Part[]): FoldedPart {
  return {
    key,
    bytes: group.reduce((sum, p) => sum + p.bytes, 0),
    count: group.reduce((sum, p) => sum + p.count, 0),
    categories: group.reduce<Categories>((sum, p) => added(sum, p.categories ?? {}), {}),
    members: [...group].sort((a, b) => b.bytes - a.bytes),
  };
}
