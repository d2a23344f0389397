import type { BandsAnswer } from "../../api/stacks";
import { exactBytes, percent, withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { Swatch } from "../category";
import { divisionLabel, partLabel } from "../divisions";
import { Name } from "../name";

/** The colours, and what share of the highest moment the small ones are. */
export function BandsKey({ answer, colour }: { answer: BandsAnswer; colour: string }) {
  const { rest, peak, bands } = answer;
  const small = rest[peak.column] ?? 0;
  return (
    <>
      <ul class="legend" data-testid="bands-key">
        {answer.keys.map(
          (part, i) =>
            part.count > 0 && (
              <li key={part.key} title={`${exactBytes(part.bytes)} in ${grouped(part.count)} of the allocations shown`}>
                <Swatch by={colour} of={part.key} index={i} />
                <Name text={partLabel(colour, part.label)} prose />
              </li>
            ),
        )}
      </ul>
      <p class="foot" data-testid="bands-sum" title={answer.others > 0 ? `${exactBytes(small)} in the smaller ones` : undefined}>
        {grouped(bands.row.length)} {bands.row.length === 1 ? "allocation is" : "allocations are"} drawn one by one
        {answer.others > 0
          ? `; the ${grouped(answer.others)} others, none of them larger, lie on top in paler piles by ${divisionLabel(colour).toLowerCase()}: ${withUnit(small)}, ${percent(small, peak.bytes)} of the highest moment shown`
          : ": these are all"}
        .
      </p>
    </>
  );
}
