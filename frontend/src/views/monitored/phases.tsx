import type { StepFiguresAnswer } from "../../api/types";
import { exactBytes, inUnit, unitFor } from "../../state/bytes";
import { grouped } from "../../state/numbers";
import { duration, exactTime } from "../../state/time";
import { Name } from "../name";
import { ShareBar } from "../share_bar";
import { Heads } from "../heads";
import { BytesCell } from "../amount";

/** The step's named phases, in the order in which they first ended. */
export function Phases({ answer }: { answer: StepFiguresAnswer }) {
  const { phases, peak_bytes } = answer;
  if (phases.length === 0) return null;
  const unit = unitFor(peak_bytes);
  return (
    <section class="card" data-testid="phases">
      <h2>Phases of the step</h2>
      <table class="plain phases">
        <Heads columns={[
            "phase",
            { unseen: "share of the step's peak" },
            { number: `peak, ${unit.name}` },
            { number: `at its end, ${unit.name}` },
            { number: "time" },
            { number: "runs" },
          ]} />
        <tbody>
          {phases.map((phase) => (
            <tr key={phase.name} data-testid="phase-row" data-key={phase.name}>
              <th scope="row">
                <Name text={phase.name} />
              </th>
              <td>
                <ShareBar share={phase.peak_bytes / peak_bytes} />
              </td>
              <td class="number strong" title={exactBytes(phase.peak_bytes)}>
                {phase.at_least && "≥ "}
                {inUnit(phase.peak_bytes, unit)}
              </td>
              <BytesCell bytes={phase.end_bytes} unit={unit} />
              <td class="number" title={exactTime(phase.duration_ns)}>
                {duration(phase.duration_ns)}
              </td>
              <td class="number muted">{grouped(phase.count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
