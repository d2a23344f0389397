import type { CurveAnswer } from "../../api/types";
import { categoryLabel } from "../../state/categories";
import { Swatch } from "../category";
import { isOurs, partLabel } from "../divisions";
import { Name } from "../name";

/** What every color of the picture is, from its bottom: also of parts that are not alive at the cursor. */
export function Legend({ curve, by, reserve }: { curve: CurveAnswer; by: string; reserve: boolean }) {
  const drawn = curve.keys.flatMap((key, index) => (curve.stacks[index]?.some((bytes) => bytes > 0) ? [{ key, index }] : []));
  return (
    <ul class="legend" data-testid="timeline-key" aria-label="Colors of the picture">
      {drawn.map(({ key, index }) => (
        <li key={key} data-key={key}>
          <Swatch by={by} of={key} index={index} />
          {isOurs(by) ? categoryLabel(key) : <Name text={partLabel(by, curve.labels?.[index] ?? key)} module={by === "module"} />}
        </li>
      ))}
      {curve.reserved && reserve && (
        <li>
          <span class="line dashes" aria-hidden="true" /> reserved
        </li>
      )}
    </ul>
  );
}
