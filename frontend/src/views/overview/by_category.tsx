import type { Categories, StepAnswer } from "../../api/types";
import { exactBytes, percent, unitFor, withUnit } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { categoryLabel } from "../../state/categories";
import { CategoryBar, Swatch } from "../category";
import { RouteLink } from "../route_link";
import { Heads } from "../heads";
import { BytesCell } from "../amount";

/** The peak's categories: one bar, and the same as a table that sums to it. */
export function ByCategory({ peak }: { peak: StepAnswer["peak"] }) {
  const unit = unitFor(peak.bytes);
  const categories: Categories = Object.fromEntries(peak.by_category.map((p) => [p.key, p.bytes]));
  const sum = peak.by_category.reduce((s, p) => s + p.bytes, 0);
  return (
    <section class="card" data-testid="by-category">
      <h2>In the peak, by category</h2>
      <CategoryBar categories={categories} full={peak.bytes} unit={unit} tall />
      <table class="plain">
        <Heads columns={["category", { number: unit.name }, { number: "share" }, { number: "allocations" }]} />
        <tbody>
          {peak.by_category.map((part) => (
            <tr key={part.key} data-testid="category-row" data-key={part.key}>
              <th scope="row">
                <Swatch of={part.key} />
                <RouteLink to={{ view: "timeline", by: "category", t: String(peak.time_ns) }}>
                  {categoryLabel(part.key)}
                </RouteLink>
              </th>
              <BytesCell bytes={part.bytes} unit={unit} />
              <td class="number muted">{percent(part.bytes, peak.bytes)}</td>
              <td class="number muted">{grouped(part.count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <p class="foot" title={exactBytes(sum)} data-testid="category-sum">
        parts sum to {withUnit(sum, unit)}
      </p>
    </section>
  );
}
