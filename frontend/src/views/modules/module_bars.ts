/** How modules look in the icicle: tinted like their largest category, and split by category along the edge. */
import type { Categories } from "../../api/types";
import type { Bar, Paints } from "../../draw/paint_flame";
import { inStackingOrder } from "../../state/categories";
import type { Icicle } from "../../state/module_icicle";
import type { ModuleNode } from "../../state/module_tree";
import { cellText } from "../../state/names";

const TINT = 0.3;

type Filter = ((node: ModuleNode) => boolean) | null;

export function moduleBars(icicle: Icicle, filter: Filter): (paints: Paints) => (place: number) => Bar {
  // Once, not on every movement of the pointer.
  const all = icicle.categories.map(sharesOf);
  const words = icicle.node.map((node, place) => ({
    name: cellText(icicle.name[place]!),
    more: cellText(node?.className ?? ""),
    found: filter && node ? filter(node) : undefined,
  }));
  return ({ read, category }) =>
    (place) => {
      const node = icicle.node[place]!;
      const { shares, largest } = all[place]!;
      return {
        fill: node ? category(largest) : read("--flame-root"),
        ...(node && { tint: TINT }),
        split: shares.map(([key, share]) => [category(key), share]),
        ...words[place]!,
        strong: node === null,
        ink: read("--text"),
      };
    };
}

function sharesOf(categories: Categories): { shares: [string, number][]; largest: string } {
  const parts = inStackingOrder(categories);
  const whole = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const [largest] = parts.reduce((top, part) => (part[1] > top[1] ? part : top), ["unknown", 0]);
  return { shares: parts.map(([key, bytes]) => [key, bytes / whole]), largest };
}
