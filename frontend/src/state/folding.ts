/**
 * Layers that repeat fold into one row: blocks.0.mlp and blocks.1.mlp become blocks.*.mlp, and experts within layers
 * blocks.*.experts.*.up. The Timeline's groups and the advice keep the same rule in Python (analysis/folded_layers.py);
 * tests/analysis/folded_layers.json holds the two together.
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

/** Fewest layers that fold. By their names alone bare ones never do: net.0 and net.1 of a Sequential are unlike. */
export const FEWEST = 2;

/** Stands for a folded number where patterns are compared: no segment of a name is this. */
const STAR = "\0";

function segmentsOf(key: string): string[] {
  return key.startsWith("outside:") ? [key] : key.split(".");
}

/**
 * Each key with a star for every number in a list that folds. A list is what stands before a number; lists within
 * layers that fold are one, so the first number of every key is judged first, then the second, and so on.
 */
function patterns(keys: readonly string[]): string[] {
  const starred = keys.map(segmentsOf);
  const numbers = starred.map((segments) => segments.flatMap((segment, at) => (/^[0-9]{1,9}$/.test(segment) ? [at] : [])));
  const most = numbers.reduce((top, found) => Math.max(top, found.length), 0);
  for (let turn = 0; turn < most; turn++) {
    const lists = new Map<string, { layers: Set<number>; deep: boolean; rows: number[] }>();
    numbers.forEach((found, row) => {
      const at = found[turn];
      if (at === undefined) return;
      const segments = starred[row]!;
      const name = segments.slice(0, at).join(".");
      const list = lists.get(name) ?? { layers: new Set(), deep: false, rows: [] };
      list.layers.add(Number(segments[at]));
      list.deep ||= at + 1 < segments.length;
      list.rows.push(row);
      lists.set(name, list);
    });
    for (const { layers, deep, rows } of lists.values())
      if (deep && layers.size >= FEWEST) for (const row of rows) starred[row]![numbers[row]![turn]!] = STAR;
  }
  return starred.map((segments) => segments.join("."));
}

/** The things of each row, by the row's name, in the order of their first thing. */
export function inRows<T extends { key: string }>(things: readonly T[]): [string, T[]][] {
  const rows = new Map<string, T[]>();
  patterns(things.map((thing) => thing.key)).forEach((pattern, i) => put(rows, pattern, things[i]!));
  return [...rows.values()].map((row) => [rowName(row), row]);
}

/** The things of one row in smaller ones: by the first number in which they differ, in its order. */
export function inLayers<T extends { key: string }>(row: readonly T[]): [string, T[]][] {
  const split = row.map((thing) => segmentsOf(thing.key));
  const at = split[0]!.findIndex((segment, i) => split.some((segments) => segments[i] !== segment));
  const layers = new Map<string, T[]>();
  row.forEach((thing, i) => put(layers, split[i]![at] ?? "", thing));
  return [...layers].sort(([a], [b]) => Number(a) - Number(b)).map(([, layer]) => [rowName(layer), layer]);
}

/** What tells a layer from the others of the opened row that it stands in: `experts.7`. */
export function layerOf(key: string, row: string): string {
  const [inner, outer] = [segmentsOf(key), segmentsOf(row)];
  const at = outer.findIndex((segment, i) => segment !== inner[i]);
  return inner.slice(Math.max(0, at - 1), at + 1).join(".");
}

function put<T>(rows: Map<string, T[]>, name: string, thing: T): void {
  const row = rows.get(name);
  if (row) row.push(thing);
  else rows.set(name, [thing]);
}

/** What all have in common, with a star where they differ. */
function rowName(row: readonly { key: string }[]): string {
  const [first, ...rest] = row.map((thing) => segmentsOf(thing.key));
  return first!.map((segment, at) => (rest.every((segments) => segments[at] === segment) ? segment : "*")).join(".");
}

export function foldParts(parts: Part[]): FoldedPart[] {
  return together(inRows(parts));
}

/** What an opened row shows: its layers, each a row that may be opened again. */
export function opened(row: FoldedPart): FoldedPart[] {
  return together(inLayers(row.members));
}

function together(rows: [string, Part[]][]): FoldedPart[] {
  return rows.map(([key, group]) => asOne(key, group)).sort((a, b) => b.bytes - a.bytes);
}

function asOne(key: string, group: Part[]): FoldedPart {
  return {
    key,
    bytes: group.reduce((sum, p) => sum + p.bytes, 0),
    count: group.reduce((sum, p) => sum + p.count, 0),
    categories: group.reduce<Categories>((sum, p) => added(sum, p.categories ?? {}), {}),
    members: [...group].sort((a, b) => b.bytes - a.bytes),
  };
}
