/** The divisions that a window knows something of, and what they are called. */
import { address } from "../api/request";
import { useRemote } from "../api/remote";
import type { DivisionsAnswer } from "../api/types";
import { categoryLabel } from "../state/categories";
import { lineParts } from "../state/frames";
import { moduleLabel } from "../state/names";
import type { Pick } from "../state/selection";

const LABELS: Record<string, string> = {
  category: "Category",
  subcategory: "Subcategory",
  module: "Module",
  phase: "Phase",
  operator: "Operator",
  line: "Source line",
  stack: "Stack",
  annotation: "Annotation",
  pool: "Pool",
  stream: "Stream",
  dtype: "Dtype",
  label: "Label",
  context: "Compiled graph",
};

/** Those whose names are ours, not from outside. */
export function isOurs(by: string): boolean {
  return by === "category" || by === "phase";
}

export function divisionLabel(by: string): string {
  return LABELS[by] ?? by;
}

/** Those that hold something in this window; until that is known, and where it cannot be, the given few and what the address asks for. */
export function useDivisions(pick: Pick | null, few: readonly string[], asked?: string): string[] {
  const answer = useRemote<DivisionsAnswer>(pick ? address("divisions", { ...pick }) : null);
  if (answer.data) return answer.data.divisions.filter((by) => by in LABELS);
  return asked !== undefined && asked in LABELS && !few.includes(asked) ? [...few, asked] : [...few];
}

/** A part's label as people read it: source lines without the folders, before them what tells stacks of one line apart. */
export function partLabel(by: string, label: string, own = ""): string {
  if (own !== "") return `${own} · ${partLabel(by, label)}`;
  if (isOurs(by) || by === "subcategory") return categoryLabel(label);
  if (by === "module") return moduleLabel(label);
  if (by !== "line" && by !== "stack") return label;
  const { place, name } = lineParts(label);
  return name ? `${name} ${place}` : place;
}
