import type { MomentAnswer } from "../../api/types";
import { type Unit, unitWithin } from "../../state/bytes";
import { lineParts } from "../../state/frames";
import { allocationName, titleText } from "../../state/names";
import { Swatch } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";
import { Tensor } from "../tensor";
import { BytesCell } from "../amount";

interface Props {
  title: string;
  rows: MomentAnswer["largest"];
  page: Unit;
  /** Whether the picture beside it is colored by category, so that a color means the same in both. */
  coloured: boolean;
}

/** Single allocations, each with the way to it. */
export function LargeAllocations({ title, rows, page, coloured }: Props) {
  if (rows.length === 0) return null;
  const unit = unitWithin(page, rows[0]!.bytes);
  return (
    <>
      <h3>
        {title}, {unit.name}
      </h3>
      <table class="plain large-list">
        <tbody>
          {rows.map((a, i) => (
            <tr key={i}>
              <BytesCell bytes={a.bytes} unit={unit} />
              <td>
                <span class="flexed" title={titleText(a.why)}>
                  {coloured && <Swatch of={a.category} />}
                  <RouteLink to={{ view: "allocations", block: String(a.row) }}>
                    <Name text={nameOrLine(a)} />
                  </RouteLink>
                  <Tensor text={a.tensor} />
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

/** What an allocation is called; where nothing but the root names it, the code that asked for it, else where it lies. */
function nameOrLine(a: MomentAnswer["largest"][number]): string {
  const [name, line] = [allocationName(a), a.line === null ? null : lineParts(a.line).place];
  return (a.name === null && a.module === "" ? (line ?? name) : (name ?? line)) ?? a.address;
}
