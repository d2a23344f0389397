import type { Allocation, StepAnswer } from "../../api/types";
import { exactBytes, inUnit, unitFor, unitWithin } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { duration } from "../../state/time";
import { Swatch } from "../category";
import { Name } from "../name";
import { RouteLink } from "../route_link";

/** The largest allocations alive at the peak: what each is, where it was made, how long it lives. */
export function Largest({ peak }: { peak: StepAnswer["peak"] }) {
  if (peak.largest.length === 0) return null;
  const unit = unitWithin(unitFor(peak.bytes), peak.largest[0]!.bytes);
  return (
    <section class="card" data-testid="largest">
      <h2>Largest alive at the peak</h2>
      <table class="plain largest">
        <thead>
          <tr>
            <th scope="col" class="number">
              {unit.name}
            </th>
            <th scope="col">what</th>
            <th scope="col">category</th>
            <th scope="col">made by</th>
            <th scope="col" class="number">
              lives
            </th>
          </tr>
        </thead>
        <tbody>
          {peak.largest.slice(0, 8).map((a, i) => (
            <tr key={i}>
              <td class="number strong" title={exactBytes(a.bytes)}>
                {inUnit(a.bytes, unit)}
              </td>
              <td class="cut">
                <Name text={allocationName(a)} />
              </td>
              <td>
                <Swatch of={a.category} />
                {categoryLabel(a.category)}
              </td>
              <td class="cut">
                {a.operator ? <Name text={a.operator} /> : <span class="muted">before the window</span>}
              </td>
              <td class="number muted">{lifetime(a)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

export function allocationName(a: Allocation): string {
  return a.name ?? a.module ?? a.operator ?? "(not named)";
}

function lifetime(a: Allocation) {
  if (a.born_ns === null) return a.freed_ns === null ? "throughout" : "until freed";
  const born = { view: "timeline", t: String(a.born_ns) } as const;
  return <RouteLink to={born}>{a.freed_ns === null ? "to the end" : duration(a.freed_ns - a.born_ns)}</RouteLink>;
}
