import { OUT_OF_MEMORY } from "../../api/contract";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { AccountJson, AccountMoment, CompareAnswer, Note, StepAnswer, StepStats } from "../../api/types";
import { alone, base, isAlone, picked, runs, selection } from "../../state/app";
import { exactBytes, unitFor, withUnit } from "../../state/bytes";
import { cellText, isModule, titleText } from "../../state/names";
import { grouped } from "../../state/numbers";
import type { Pick } from "../../state/selection";
import { EQUAL } from "../../state/ranks";
import { changeSince, headline } from "../../state/sentences";
import { duration } from "../../state/time";
import { CAUSES } from "../allocator/sentences";
import { AnotherRun } from "../another_run";
import { type Failure, useFailed } from "../failed";
import { Notes, Notice } from "../notices";
import { OtherRanks } from "../other_ranks";
import { RouteLink } from "../route_link";
import { Headline, Sentence } from "../sentence";
import { FailureState, Loading } from "../states";
import { PeakOfAllSteps, PeakOfEachStep } from "../steps/peaks";
import { aboutModules, hasOnlyFigures } from "../times";
import { WholeDevice } from "../whole_device";
import { Cards } from "./cards";
import { Findings } from "./findings";
import { Largest } from "./largest";
import { ByCategory, ByLine, ByModule } from "./peak_parts";

/** Whether the recording itself says which module each block is of; what is inferred from stacks is in Modules. */
function namesModules(answer: StepAnswer): boolean {
  return aboutModules(answer) === null && answer.peak.by_module.some((part) => isModule(part.key));
}

/** What peaked, where, and what changed; below it the numbers that prove it. */
export function Overview() {
  const pick = picked.value!;
  const step = useRemote<StepAnswer>(address("step", pick), 0, ["step"]);
  const failed = useFailed(pick, step.data?.stats, [pick.step]);
  if (step.failure) return <FailureState failure={step.failure} />;
  const answer = step.data;
  if (!answer) return <Loading what={`step ${pick.step}`} />;
  return (
    <div class={step.stale ? "stale" : undefined} aria-busy={step.stale}>
      <Headline pieces={headline(answer, alone.value)} />
      <Change answer={answer} />
      <HigherStep bytes={answer.peak.bytes} />
      <OtherRanks />
      <OutOfMemory failed={failed} stats={answer.stats} />
      <Cards answer={answer} />
      <AccountLine account={answer.account} />
      <div class="pair">
        {isReadable(answer.source) && <Findings pick={pick} />}
        {selection.value!.monitored ? (
          <PeakOfAllSteps selection={selection.value!} bytes={answer.peak.bytes} />
        ) : (
          <PeakOfEachStep selection={selection.value!} />
        )}
      </div>
      <div class="pair">
        <ByCategory peak={answer.peak} />
        {namesModules(answer) || !answer.source.side_file_present || hasOnlyFigures(answer) ? (
          <ByModule peak={answer.peak} />
        ) : (
          <ByLine peak={answer.peak} />
        )}
      </div>
      <WholeDevice whole={answer.whole_device} />
      <Largest pick={pick} answer={answer} />
      <Notes notes={withoutFailures(answer.notes, pick, failed)} />
      <Source answer={answer} />
    </div>
  );
}

/** Where a monitor saw a higher step on this device, of which there is no more than its figures. */
function HigherStep({ bytes }: { bytes: number }) {
  const { monitored, steps } = selection.value!;
  if (!monitored) return null;
  const { highest_bytes, highest_step } = monitored;
  const above = highest_bytes - bytes;
  if (above <= EQUAL * highest_bytes || steps.some(({ step }) => step === highest_step)) return null;
  return (
    <p class="lead" data-testid="higher-step">
      <strong class="amount" title={exactBytes(above)}>
        {withUnit(above, unitFor(highest_bytes))}
      </strong>{" "}
      below step {highest_step}, the highest of all that were watched, which was not recorded in full.{" "}
      <RouteLink to={{ step: String(highest_step) }}>Show step {highest_step}</RouteLink>
    </p>
  );
}

/** Whether the events can be read: the side file is there, and is none of those with problems. */
function isReadable({ side_file, side_file_present }: StepAnswer["source"]): boolean {
  return side_file_present && !runs.value?.problems.some((problem) => problem.file.replaceAll("\\", "/").endsWith(side_file));
}

const IMPORTED: Record<string, string> = {
  snapshot: "Read from a snapshot of the allocator",
  kineto: "Read from a trace of torch.profiler",
  "memory timeline": "Read from a memory timeline of torch.profiler",
  MemoryEstimator: "Estimated by MemoryEstimator",
};

function Source({ answer }: { answer: StepAnswer }) {
  const { source } = answer;
  const present = source.side_file_present ? "" : " (the file is missing: no moments, no zoom)";
  return (
    <p class="source muted breaking">
      {IMPORTED[source.kind] ?? `Recorded by ${cellText(source.kind)}`}
      {source.torch !== null && <> with torch {cellText(source.torch)}</>}; events in{" "}
      <span class="mono">{titleText(source.side_file)}</span>
      {present}.
    </p>
  );
}

/** How the window's bytes agree with the allocator's own; the numbers of each moment on hover. */
function AccountLine({ account }: { account: AccountJson }) {
  return (
    <p class={`account ${account.level}`} data-testid="account" title={account.moments.map(momentText).join("\n")}>
      <span class="kind">Account of the window:</span> {titleText(account.text)}
    </p>
  );
}

function momentText({ moment, counted_bytes, allocator_bytes, at_least }: AccountMoment): string {
  const counted = `${moment}: ${exactBytes(counted_bytes)} recorded`;
  if (allocator_bytes === null) return counted;
  return `${counted}, ${at_least ? "at least " : ""}${exactBytes(allocator_bytes)} by the counter`;
}

/** Without the notes that say the same of this device; those of other devices stay. */
export function withoutFailures(notes: Note[], { device }: Pick, failed: Failure[]): Note[] {
  return failed.length === 0 ? notes : notes.filter((note) => note.code !== OUT_OF_MEMORY || note.device !== device);
}

/** Where a request failed in this step, that comes before all numbers. */
function OutOfMemory({ failed, stats }: { failed: Failure[]; stats: StepStats }) {
  const [first] = failed;
  if (!first) return null;
  const why = CAUSES[first.cause ?? ""];
  return (
    <div class="over-cards">
      <Notice level="warning" testid="out-of-memory">
        Out of memory {duration(first.time_ns - stats.step_start_ns)} after the start: a request of{" "}
        <strong title={exactBytes(first.requested_bytes)}>{withUnit(first.requested_bytes)}</strong> failed
        {why && <>, because {why}</>}
        {failed.length > 1 && <>, and {grouped(failed.length - 1)} more after it</>}.{" "}
        <RouteLink to={{ view: "allocator", t: String(first.time_ns), event: String(first.event) }}>
          What there was, and why it did not fit
        </RouteLink>
      </Notice>
    </div>
  );
}

const OTHER_RUNS = 'of this run: pick another run under "Compare with"';
const NO_OTHER = "here: there is nothing to compare it with";

function othersRecorded(): boolean {
  return (runs.value?.runs.length ?? 0) > 1;
}

/** What is different from what "Compare with" says, and the way to another run. */
export function Change({ answer }: { answer: StepAnswer }) {
  const basis = base.value;
  return (
    <p class="lead" data-testid="change">
      {basis ? (
        <Since answer={answer} basis={basis} />
      ) : (
        `The only ${alone.value ? "recording" : "step"} ${othersRecorded() ? OTHER_RUNS : NO_OTHER}.`
      )}
      {(basis === null || basis.run === answer.run) && <AnotherRun lead=" · " />}
    </p>
  );
}

function Since({ answer, basis }: { answer: StepAnswer; basis: Pick }) {
  const { run, worker, device, step } = answer;
  const sides = { base_run: basis.run, base_worker: basis.worker, base_step: basis.step, base_device: basis.device };
  const change = useRemote<CompareAnswer>(address("compare", { by: "module", run, worker, device, step, ...sides }));
  const link = {
    view: "compare",
    base_run: basis.run,
    base_worker: basis.worker,
    base_step: String(basis.step),
    what: "module",
  } as const;
  const same = change.data?.rows.every((row) => row.delta_bytes === 0);
  return (
    <>
      {change.data ? (
        <Sentence pieces={changeSince(named(change.data), unitFor(answer.peak.bytes))} />
      ) : change.failure ? (
        change.failure.what
      ) : (
        "Comparing …"
      )}{" "}
      {!same && (
        <RouteLink to={link} testid="show-difference">
          Show the difference
        </RouteLink>
      )}
    </>
  );
}

function named(answer: CompareAnswer): CompareAnswer {
  return { ...answer, base: { ...answer.base, alone: isAlone(answer.base) } };
}
