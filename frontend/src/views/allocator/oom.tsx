import type { OomReport } from "../../api/types";
import { exactBytes, unitFor, withUnit } from "../../state/bytes";
import { titleText } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import { duration, exactTime } from "../../state/time";
import { shortLine } from "./state_panel";
import { BytesCell } from "../amount";
import { Heads } from "../table";

interface Props {
  report: OomReport;
  origin: number;
  shown: boolean;
  onShow: () => void;
}

/** A failed request: what it asked for, what there was, and why that was not enough. */
export function Oom({ report, origin, shown, onShow }: Props) {
  const unit = unitFor(report.active_bytes, report.requested_bytes);
  return (
    <section class="card oom" data-testid="oom-report" data-key={report.number} aria-label="Out of memory">
      <div class="row">
        <h2>
          Out of memory at <span title={exactTime(report.time_ns - origin)}>{duration(report.time_ns - origin)}</span>,
          event {grouped(report.event)}
        </h2>
        <span class="grow" />
        <button type="button" class="action" data-testid="to-oom" disabled={shown} onClick={onShow}>
          {shown ? "This moment is shown" : "Show this moment"}
        </button>
      </div>
      <p class="why" data-testid="oom-why">
        {titleText(report.why)}
      </p>
      <dl class="figures">
        <Figure label="requested" bytes={report.requested_bytes} unit={unit} testid="oom-requested" strong />
        <Figure label="free on the device" bytes={report.free_bytes} unit={unit} testid="oom-free" />
        <Figure label="reserved" bytes={report.reserved_bytes} unit={unit} testid="oom-reserved" />
        <Figure label="in use" bytes={report.active_bytes} unit={unit} testid="oom-active" />
        <Figure label="free in the reserve" bytes={report.reserve_free_bytes} unit={unit} testid="oom-reserve-free" />
        <Figure
          label="largest block it could use"
          bytes={report.largest_usable_bytes}
          unit={unit}
          testid="oom-largest"
        />
      </dl>
      {report.lines.length > 0 && <Biggest report={report} />}
    </section>
  );
}

function Figure(props: {
  label: string;
  bytes: number | null;
  unit: { name: string; size: number };
  testid: string;
  strong?: boolean;
}) {
  const { label, bytes, unit, testid, strong } = props;
  return (
    <div class={strong ? "asked" : undefined}>
      <dt>{label}</dt>
      <dd class="amount" data-testid={testid} title={bytes === null ? undefined : exactBytes(bytes)}>
        {bytes === null ? "unknown" : withUnit(bytes, bytes < unit.size ? undefined : unit)}
      </dd>
    </div>
  );
}

const LINES = 6;

/** What was in use then, by the line that asked for it; what is not shown is one row, so that all sum to it. */
function Biggest({ report }: { report: OomReport }) {
  const unit = unitFor(report.lines[0]!.bytes);
  const most = report.lines[0]!.bytes;
  const hidden = report.lines.slice(LINES);
  const rest = report.other_lines.bytes + hidden.reduce((sum, line) => sum + line.bytes, 0);
  const others = report.other_lines.lines + hidden.length;
  return (
    <table class="plain biggest">
      <Heads columns={["most in use, by source line", { number: "blocks" }, { number: unit.name }, { unseen: "as a bar" }]} />
      <tbody>
        {report.lines.slice(0, LINES).map((line) => (
          <tr key={line.line} data-testid="oom-line" data-key={line.line}>
            <th scope="row" class="cut" title={titleText(`${line.line}\n\n${line.stack}`)}>
              <span class="mono one-line">{shortLine(line.line)}</span>
            </th>
            <td class="number">{grouped(line.count)}</td>
            <BytesCell bytes={line.bytes} unit={unit} />
            <td>
              <span class="bar">
                <span class="stack-bar" style={{ width: `${(100 * line.bytes) / most}%` }} />
              </span>
            </td>
          </tr>
        ))}
        {others > 0 && (
          <tr data-testid="oom-rest">
            <th scope="row" class="muted">
              {counted(others, "other line")}
            </th>
            <td class="number muted">
              {grouped(report.other_lines.count + hidden.reduce((sum, line) => sum + line.count, 0))}
            </td>
            <BytesCell bytes={rest} unit={unit} tone="muted" />
            <td />
          </tr>
        )}
      </tbody>
    </table>
  );
}
