/** Layers that repeat fold into one row: blocks.0.mlp and blocks.1.mlp become blocks.*.mlp. */
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

/** The key with its first numbered segment starred; null where it has none. */
export function pattern(key: string): string | null {
  if (key.startsWith("outside:")) return null;
  const segments = key.split(".");
  const at = segments.findIndex((segment) => /^\d+$/.test(segment));
  if (at < 0) return null;
  segments[at] = "*";
  return segments.join(".");
}

/**
 * Fewest parts that make a row of their own. A bare number at the end (net.0, net.2) is often a plain
 * sequence of different things, so it takes more of them than a layer with something inside.
 */
function fewest(starred: string): number {
  return starred.endsWith("*") ? 4 : 2;
}

export function foldParts(parts: Part[]): FoldedPart[] {
  const groups = new Map<string, Part[]>();
  for (const part of parts) {
    const starred = pattern(part.key);
    if (starred === null) continue;
    const group = groups.get(starred);
    if (group) group.push(part);
    else groups.set(starred, [part]);
  }
  const folded: FoldedPart[] = [];
  for (const part of parts) {
    const starred = pattern(part.key);
    const group = starred === null ? undefined : groups.get(starred);
    if (starred === null || !group || group.length < fewest(starred)) folded.push(single(part));
    else if (group[0] === part) folded.push(together(starred, group));
  }
  return folded.sort((a, b) => b.bytes - a.bytes);
}

function single(part: Part): FoldedPart {
  return { key: part.key, bytes: part.bytes, count: part.count, categories: part.categories ?? {}, members: [part] };
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
