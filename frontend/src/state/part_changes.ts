/** How far each part of a moment is from another moment's: exact, and silent where it is not known. */
import type { LabeledPart } from "../api/types";

export interface PartChanges {
  /** Bytes that a part has more than it had; undefined where that is not known. */
  of: (key: string) => number | undefined;
  /** What all parts but these have more together. */
  rest: (shown: readonly { key: string }[]) => number;
  /** Parts that were there and are not in these, with no bytes. */
  gone: (parts: readonly LabeledPart[]) => LabeledPart[];
}

/** The server's sum of the parts that it does not list: what is in there cannot be told apart. */
const UNLISTED = "(others)";

/** `deltas` has every part of both moments, or all that are listed and the others' sum. */
export function partChanges(deltas: ReadonlyMap<string, number>): PartChanges {
  const cut = deltas.has(UNLISTED);
  const of = (key: string): number | undefined => deltas.get(key) ?? (cut ? undefined : 0);
  const total = [...deltas.values()].reduce((sum, bytes) => sum + bytes, 0);
  return {
    of,
    rest: (shown) => shown.reduce((left, { key }) => left - (of(key) ?? 0), total),
    gone: (parts) => {
      const here = new Set(parts.filter((part) => part.bytes > 0).map((part) => part.key));
      return [...deltas]
        .filter(([key, bytes]) => bytes < 0 && key !== UNLISTED && !here.has(key))
        .map(([key]) => ({ key, label: key, bytes: 0, count: 0 }));
    },
  };
}

type Sized = readonly { key: string; bytes: number }[];

/** Each part of either moment; where only one of them is cut short, its listed parts alone are held apart. */
export function deltasTo(parts: Sized, before: Sized): Map<string, number> {
  const [now, then] = [bytesOf(parts), bytesOf(before)];
  const cut = now.has(UNLISTED) || then.has(UNLISTED);
  const deltas = new Map<string, number>();
  let unlisted = 0;
  for (const key of new Set([...now.keys(), ...then.keys()])) {
    const delta = (now.get(key) ?? 0) - (then.get(key) ?? 0);
    if (cut && !(now.has(key) && then.has(key))) unlisted += delta;
    else if (key === UNLISTED) unlisted += delta;
    else deltas.set(key, delta);
  }
  if (cut) deltas.set(UNLISTED, unlisted);
  return deltas;
}

function bytesOf(parts: Sized): Map<string, number> {
  return new Map(parts.map((part) => [part.key, part.bytes]));
}
