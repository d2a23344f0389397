import { STEPS_JOINED } from "../../api/contract";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { Note, StepFiguresAnswer } from "../../api/types";
import { picked, selection } from "../../state/app";
import { exactBytes, inUnit, percent, type Unit, unitFor, withUnit } from "../../state/bytes";
import { cellText } from "../../state/names";
import { decimals, grouped } from "../../state/numbers";
import { duration, exactTime, inTimeUnit, timeUnitFor } from "../../state/time";
import { Bytes, BytesCell, Delta } from "../amount";
import { Name } from "../name";
import { Notes } from "../notices";
import { Card } from "../overview/cards";
import { Findings } from "../overview/findings";
import { OtherRanks } from "../other_ranks";
import { RouteLink } from "../route_link";
import { FailureState, Loading } from "../states";
import { PeakOfAllSteps } from "../steps/peaks";
import { Heads, ShareBar } from "../table";
import { WholeDevice } from "../whole_device";
import { HowToRecord } from "./only_figures";

/** A step of which there are figures alone: what peaked, and how it stands among all steps. */
export function MonitoredOverview() {
  const pick = picked.value!;
  const { run, worker, device, step } = pick;
  const figures = useRemote<StepFiguresAnswer>(address("step_figures", { run, worker, device, step }), 0, ["step"]);
  const answer = figures.data;
  if (figures.failure)
    return (
      <>
        <FailureState failure={figures.failure} />
        <PeakOfAllSteps selection={selection.value!} bytes={undefined} />
      </>
    );
  if (!answer) return <Loading what={`step ${step}`} />;
  const unit = unitFor(answer.peak_bytes);
  return (
    <div class={figures.stale ? "stale" : undefined} aria-busy={figures.stale}>
      <h1 class="headline" data-testid="headline">
        Step {answer.step} peaked at {answer.at_least && "no less than "}
        <strong class="amount" title={exactBytes(answer.peak_bytes)}>
          {withUnit(answer.peak_bytes, unit)}
        </strong>
        {answer.kind === "process" ? " of resident memory." : "."}
      </h1>
      <Among answer={answer} />
      <OtherRanks />
      <Cards answer={answer} unit={unit} />
      <PeakOfAllSteps selection={selection.value!} bytes={answer.peak_bytes} />
      <Findings pick={pick} />
      <Phases answer={answer} />
      <WholeDevice whole={answer.whole_device} />
      <Notes notes={notesOf(answer)} />
      <HowToRecord />
      <p class="source muted breaking">
        Figures of MemoryMonitor
        {answer.torch !== null && <> with torch {cellText(answer.torch)}</>}
        {answer.product !== "" && <> on {cellText(answer.product)}</>}: one row per step, no single allocations.
      </p>
    </div>
  );
}

function Among({ answer }: { answer: StepFiguresAnswer }) {
  const { whole, step } = answer;
  const below = whole.highest_bytes - answer.peak_bytes;
  return (
    <p class="lead" data-testid="among">
      {below === 0 ? (
        <>The highest of {grouped(whole.count)} steps so far. </>
      ) : (
        <>
          <strong class="amount" title={exactBytes(below)}>
            {withUnit(below)}
          </strong>{" "}
          below the highest of {grouped(whole.count)} steps.{" "}
          <RouteLink to={{ step: String(whole.highest_step) }} testid="highest-step">
            Show step {whole.highest_step}, the highest
          </RouteLink>
          {" · "}
        </>
      )}
      {step === whole.last ? (
        <span data-testid="is-newest">It is the newest.</span>
      ) : (
        <RouteLink to={{ step: String(whole.last) }} testid="newest-step">
          Show step {whole.last}, the newest
        </RouteLink>
      )}
    </p>
  );
}

function Cards({ answer, unit }: { answer: StepFiguresAnswer; unit: Unit }) {
  const { previous, previous_step, whole } = answer;
  const isJoined = previous_step !== null && answer.notes.some((note) => note.code === STEPS_JOINED);
  const together = isJoined ? answer.step - previous_step : 1;
  const average = whole.duration_ns / whole.count;
  const timeUnit = timeUnitFor(answer.duration_ns, average);
  return (
    <div class="cards">
      <Card
        id="peak"
        label={answer.kind === "process" ? "Peak resident" : "Peak allocated"}
        value={<Bytes bytes={answer.peak_bytes} unit={unit} named />}
      >
        <Since now={answer.peak_bytes} before={previous?.peak_bytes} step={previous_step} unit={unit} />
        {answer.capacity_bytes !== null && (
          <span title={exactBytes(answer.capacity_bytes)}>
            {" · "}
            {percent(answer.peak_bytes, answer.capacity_bytes)} of the device
          </span>
        )}
      </Card>
      {answer.peak_reserved_bytes !== null && (
        <Card id="reserved" label="Peak reserved" value={<Bytes bytes={answer.peak_reserved_bytes} unit={unit} named />}>
          {decimals(100 * (answer.fragmentation ?? 0), 1)} % of the reserve unused at the end
        </Card>
      )}
      <Card id="left" label="Left after the step" value={<Bytes bytes={answer.end_bytes} unit={unit} named />}>
        <Since now={answer.end_bytes} before={previous?.end_bytes} step={previous_step} unit={unit} />
      </Card>
      <Card
        id="time"
        label={together > 1 ? `Time of ${grouped(together)} steps` : "Step time"}
        value={<span title={exactTime(answer.duration_ns)}>{duration(answer.duration_ns, timeUnit)}</span>}
      >
        {duration(average, timeUnit)} a step on average
      </Card>
      {answer.allocations !== null && (
        <Card id="allocations" label="Allocations" value={grouped(answer.allocations)}>
          <span title={exactBytes(answer.allocated_bytes ?? 0)}>{withUnit(answer.allocated_bytes ?? 0)} in total</span>
        </Card>
      )}
      {answer.retries !== null && (
        <Card id="retries" label="Retries · out of memory" value={`${grouped(answer.retries)} · ${grouped(answer.ooms ?? 0)}`}>
          {grouped(whole.retries ?? 0)} · {grouped(whole.ooms ?? 0)} in all steps
        </Card>
      )}
    </div>
  );
}

function Since({ now, before, step, unit }: { now: number; before: number | undefined; step: number | null; unit: Unit }) {
  if (before === undefined) return <>the first step watched</>;
  if (now === before) return <span class="shrunk">the same as in step {step}</span>;
  return (
    <>
      <Delta bytes={now - before} unit={unit} named /> since step {step}
    </>
  );
}

type Shown = Pick<Note, "level" | "text">;

function notesOf(answer: StepFiguresAnswer): Shown[] {
  const notes: Shown[] = [...answer.notes];
  if (answer.kind === "process") {
    const text =
      "This is the memory of the whole process as the operating system counts it: Python, libraries and " +
      "data included. Torch itself counts nothing on the CPU.";
    notes.push({ level: "info", text });
  }
  if (answer.at_least || answer.phases.some((phase) => phase.at_least)) {
    const text =
      "The peak counter did not rise here, so ≥ marks the highest level seen when a step or phase began or " +
      "ended; in between there may have been more.";
    notes.push({ level: "info", text });
  }
  return notes;
}

/** The step's named phases, in the order in which they first ended. */
export function Phases({ answer }: { answer: StepFiguresAnswer }) {
  const { phases, peak_bytes } = answer;
  if (phases.length === 0) return null;
  const unit = unitFor(peak_bytes);
  const timeUnit = timeUnitFor(...phases.map((phase) => phase.duration_ns));
  return (
    <section class="card" data-testid="phases">
      <h2>Phases of the step</h2>
      <table class="plain phases">
        <Heads columns={[
            "phase",
            { unseen: "share of the step's peak" },
            { number: `peak, ${unit.name}` },
            { number: `at its end, ${unit.name}` },
            { number: `time, ${timeUnit.name}` },
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
                {inTimeUnit(phase.duration_ns, timeUnit)}
              </td>
              <td class="number muted">{grouped(phase.count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
