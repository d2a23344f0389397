import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { LineTableAnswer, StepAnswer } from "../../api/types";
import { picked } from "../../state/app";
import { percent, unitFor, withUnit } from "../../state/bytes";
import { searchFor } from "../../state/frames";
import { NOT_NAMED } from "../../state/names";
import { RouteLink } from "../route_link";
import { ShareBar } from "../share_bar";
import { Line } from "../stacks/ranked";
import { ByModule } from "./by_module";
import { Heads } from "../heads";
import { BytesCell } from "../amount";

const FEW = 10;

/** A trace that names no module is divided by the lines of code that allocated, else by operators; nothing where neither is known. */
export function ByLine({ peak }: { peak: StepAnswer["peak"] }) {
  const pick = picked.value!;
  const answer = useRemote<LineTableAnswer>(address("line_table", { ...pick, event: peak.event, count: FEW }));
  const data = answer.data;
  const known = data?.rows.some((row) => row.kind !== "none");
  const named = peak.by_module.some((part) => part.key !== NOT_NAMED);
  if (answer.failure || (data && !known)) return named ? <ByModule peak={peak} /> : null;
  if (!data) return <section class="card" aria-busy="true" />;
  const unit = unitFor(peak.bytes);
  const full = data.rows[0]?.bytes ?? 0;
  const rest = data.bytes - data.rows.reduce((sum, row) => sum + row.bytes, 0);
  const without = data.rows.find((row) => row.kind === "none")?.bytes ?? 0;
  return (
    <section class="card" data-testid="by-line">
      <h2>In the peak, by source line</h2>
      <table class="plain modules-short lines">
        <Heads columns={["source line", { unseen: "share", wide: true }, { number: unit.name }]} />
        <tbody>
          {data.rows.map((row) => (
            <tr key={row.line} data-testid="line-row" data-key={row.line}>
              <th scope="row">
                {row.kind === "none" ? (
                  <Line line={row.line} kind={row.kind} />
                ) : (
                  <RouteLink to={{ view: "stacks", search: searchFor(row.line) }} class="plain-link">
                    <Line line={row.line} kind={row.kind} />
                  </RouteLink>
                )}
              </th>
              <td class="wide">
                <ShareBar share={row.bytes / full} kind={row.kind} />
              </td>
              <BytesCell bytes={row.bytes} unit={unit} />
            </tr>
          ))}
          {data.rows_found > data.rows.length && (
            <tr>
              <td colSpan={2}>
                <RouteLink to={{ view: "stacks", table: "lines" }}>{data.rows_found - data.rows.length} more lines in Stacks</RouteLink>
              </td>
              <BytesCell bytes={rest} unit={unit} tone="muted" />
            </tr>
          )}
        </tbody>
      </table>
      <p class="foot">
        <RouteLink to={{ view: "stacks" }}>All call stacks</RouteLink>
        {without > 0 && ` · ${percent(without, data.bytes)} have none`} · lines sum to {withUnit(data.bytes, unit)}
      </p>
    </section>
  );
}
