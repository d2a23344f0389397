import type { BandsAnswer } from "../../api/stacks";
import { exactBytes, percent, withUnit } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { lineParts } from "../../state/frames";
import { moduleLabel } from "../../state/names";
import { grouped } from "../../state/numbers";
import { Swatch } from "../category";
import { Name } from "../name";

/** The colours, and what share of the highest moment the band of the small ones is. */
export function BandsKey({ answer, colour }: { answer: BandsAnswer; colour: string }) {
  const { rest, peak, bands } = answer;
  const small = rest[peak.column] ?? 0;
  return (
    <>
      <ul class="legend" data-testid="bands-key">
        {answer.keys.map((part, i) => (
          <li key={part.key} title={`${exactBytes(part.bytes)} in ${grouped(part.count)} of the allocations drawn`}>
            <Swatch by={colour} of={part.key} index={i} />
            <Name text={labelOf(colour, part.label)} prose />
          </li>
        ))}
        {answer.others > 0 && (
          <li title={`${exactBytes(small)} at the highest moment shown`}>
            <span class="swatch others" aria-hidden="true" />
            {grouped(answer.others)} smaller ones together
          </li>
        )}
      </ul>
      <p class="foot" data-testid="bands-sum">
        {grouped(bands.row.length)} {bands.row.length === 1 ? "allocation is" : "allocations are"} drawn one by one
        {answer.others > 0
          ? `; the ${grouped(answer.others)} smaller ones are the band on top: ${withUnit(small)}, ${percent(small, peak.bytes)} of the highest moment shown`
          : ": these are all"}
        .
      </p>
    </>
  );
}

function labelOf(colour: string, label: string): string {
  if (colour === "category" || colour === "phase") return categoryLabel(label);
  if (colour === "module") return moduleLabel(label);
  if (colour !== "line" && colour !== "stack") return label;
  const { place, name } = lineParts(label);
  return name ? `${place} ${name}` : place;
}
