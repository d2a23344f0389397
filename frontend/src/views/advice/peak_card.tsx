import type { Holder, PeakHolders } from "../../api/types";
import { alone } from "../../state/app";
import { percent, type Unit, unitFor, withUnit } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { grouped } from "../../state/numbers";
import { titleText } from "../../state/names";
import { Bytes } from "../amount";
import { Category } from "../category";
import { Name } from "../name";
import { Heads } from "../heads";

/** Who fills the peak: parts that sum to it. */
export function PeakCard({ peak }: { peak: PeakHolders }) {
  const unit = unitFor(peak.bytes);
  return (
    <section class="card" data-testid="peak-holders" aria-label="Who fills the peak">
      <h2>
        Who fills the peak of {alone.value ? "the whole window" : `step ${peak.step}`}: {withUnit(peak.bytes)}
      </h2>
      <table class="plain evidence holders">
        <Heads columns={[peak.by, { number: unit.name }, { number: "share" }, { text: "category", look: "after-number" }, { number: "blocks" }]} />
        <tbody>
          {peak.holders.map((holder, i) => (
            <Row key={i} holder={holder} of={peak.bytes} unit={unit} />
          ))}
        </tbody>
      </table>
    </section>
  );
}

function Row({ holder, of, unit }: { holder: Holder; of: number; unit: Unit }) {
  const { name, bytes, blocks, category, is_name } = holder;
  return (
    <tr data-testid="holder" data-key={name}>
      <th scope="row">{is_name ? <Name text={name} module /> : <span>{titleText(categoryLabel(name))}</span>}</th>
      <td class="number">
        <Bytes bytes={bytes} unit={unit} />
      </td>
      <td class="number">{percent(bytes, of)}</td>
      <td class="muted after-number">
        {is_name && (
          <Category of={category} />
        )}
      </td>
      <td class="number">{grouped(blocks)}</td>
    </tr>
  );
}
