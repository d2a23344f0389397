/** The categories in stacking order from the bottom, and the columns that the Modules table groups them into. */
import type { Categories } from "../api/types";

export const CATEGORIES = [
  "parameter",
  "parameter_copy",
  "buffer",
  "optimizer_state",
  "cache",
  "gradient",
  "activation",
  "autograd_detail",
  "recomputed",
  "temporary",
  "workspace",
  "input",
  "communication",
  "unknown",
] as const;

export type Category = (typeof CATEGORIES)[number];

const KNOWN = new Set<string>(CATEGORIES);

/** A name that a newer writer may add falls back to unknown's look, never to no look. */
function categoryLook(key: string): Category {
  return KNOWN.has(key) ? (key as Category) : "unknown";
}

export function categoryLabel(key: string): string {
  return key.replaceAll("_", " ");
}

/** Parts in stacking order; what this version does not know comes last. */
export function inStackingOrder(categories: Categories): [string, number][] {
  const known = CATEGORIES.filter((c) => (categories[c] ?? 0) > 0).map((c): [string, number] => [c, categories[c]!]);
  const foreign = Object.entries(categories).filter(([key, bytes]) => !KNOWN.has(key) && bytes > 0);
  return [...known, ...foreign];
}

interface CategoryGroup {
  id: string;
  label: string;
  members: readonly Category[];
}

/** The columns of the Modules table. Together they hold every category, so a row's columns sum to its total. */
export const GROUPS: readonly CategoryGroup[] = [
  { id: "parameters", label: "parameters", members: ["parameter", "parameter_copy", "buffer"] },
  { id: "gradients", label: "gradients", members: ["gradient"] },
  { id: "optimizer", label: "optimizer", members: ["optimizer_state"] },
  { id: "activations", label: "activations", members: ["activation", "autograd_detail", "recomputed"] },
  {
    id: "temporaries",
    label: "temporaries",
    members: ["temporary", "workspace"],
  },
  { id: "other", label: "other", members: ["cache", "input", "communication", "unknown"] },
];

/** Bytes of one group; foreign categories count as unknown, so nothing is lost. */
export function groupBytes(categories: Categories, group: CategoryGroup): number {
  let sum = 0;
  for (const [key, bytes] of Object.entries(categories)) {
    if ((group.members as readonly string[]).includes(categoryLook(key))) sum += bytes;
  }
  return sum;
}

export function total(categories: Categories): number {
  return Object.values(categories).reduce((sum, bytes) => sum + bytes, 0);
}

export function added(a: Categories, b: Categories): Categories {
  const sum: Categories = { ...a };
  for (const [key, bytes] of Object.entries(b)) sum[key] = (sum[key] ?? 0) + bytes;
  return sum;
}
