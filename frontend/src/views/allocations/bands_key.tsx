import type { BandsAnswer } from "../../api/types";
import { exactBytes, percent, withUnit } from "../../state/bytes";
import { counted, grouped } from "../../state/numbers";
import { Swatch } from "../category";
import { divisionLabel, partLabel } from "../divisions";
import { Name } from "../name";

interface Props {
  answer: BandsAnswer;
  color: string;
  /** How many allocations were alive in what is drawn; null while that is not known. */
  alive: number | null;
}

/** The colors, what share of the highest moment the small ones are, and how many are not drawn. */
export function BandsKey({ answer, color, alive }: Props) {
  const { rest, peak, bands, others } = answer;
  const small = rest[peak.column] ?? 0;
  return (
    <>
      <ul class="legend" data-testid="bands-key">
        {answer.keys.map(
          (part, i) =>
            part.count > 0 && (
              <li key={part.key} title={`${exactBytes(part.bytes)} in ${grouped(part.count)} of the allocations shown`}>
                <Swatch by={color} of={part.key} index={i} />
                <Name text={partLabel(color, part.label)} prose />
              </li>
            ),
        )}
      </ul>
      <p class="foot" data-testid="bands-sum" title={others > 0 ? `${exactBytes(small)} in the smaller ones` : undefined}>
        {counted(bands.row.length, "allocation is", "allocations are")} drawn one by one
        {others > 0
          ? `; ${grouped(others)} others, none of them larger, lie on top in paler piles by ${divisionLabel(color).toLowerCase()}: ${withUnit(small)}, ${percent(small, peak.bytes)} of the highest moment shown`
          : ""}
        {alive !== null && absent(alive - bands.row.length - others, others > 0)}
        .
      </p>
    </>
  );
}

/** Of what lives between the highest moments of two columns, no column shows anything. */
function absent(count: number, piles: boolean): string {
  if (count <= 0) return piles ? "" : ": these are all";
  const which = piles ? counted(count, "more lives", "more live") : counted(count, "other lives", "others live");
  return `; ${which} too briefly to show here`;
}
