import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import type { StepAnswer } from "../../api/types";
import { alone, picked, runs, selection } from "../../state/app";
import { cellText, isModule, titleText } from "../../state/names";
import { headline } from "../../state/sentences";
import { useFailed } from "../failed";
import { Notes } from "../notices";
import { OtherRanks } from "../other_ranks";
import { PeakOfAllSteps } from "../steps/peak_of_all_steps";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { aboutModules, hasOnlyFigures } from "../times";
import { WholeDevice } from "../whole_device";
import { AccountLine } from "./account";
import { Cards } from "./cards";
import { Change } from "./change";
import { ByCategory } from "./by_category";
import { ByLine } from "./by_line";
import { ByModule } from "./by_module";
import { Findings } from "./findings";
import { Largest } from "./largest";
import { OutOfMemory, withoutFailures } from "./out_of_memory";
import { PeakOfEachStep } from "../steps/peak_of_each_step";

/** Whether the recording itself says which module each block is of; what is inferred from stacks is in Modules. */
function namesModules(answer: StepAnswer): boolean {
  return aboutModules(answer) === null && answer.peak.by_module.some((part) => isModule(part.key));
}

/** What peaked, where, and what changed; below it the numbers that prove it. */
export function Overview() {
  const pick = picked.value!;
  const step = useRemote<StepAnswer>(address("step", pick), 0, ["step"]);
  const failed = useFailed(pick, step.data?.stats, [pick.step]);
  if (step.failure) return <FailureState failure={step.failure} onRetry={step.retry} />;
  const answer = step.data;
  if (!answer) return <Loading what={`step ${pick.step}`} />;
  return (
    <div class={step.stale ? "stale" : undefined} aria-busy={step.stale}>
      <Headline pieces={headline(answer, alone.value)} />
      <Change answer={answer} />
      <OtherRanks />
      <OutOfMemory failed={failed} stats={answer.stats} />
      <Cards answer={answer} />
      <AccountLine account={answer.account} />
      {selection.value!.monitored ? (
        <PeakOfAllSteps selection={selection.value!} bytes={answer.peak.bytes} />
      ) : (
        <PeakOfEachStep selection={selection.value!} />
      )}
      <div class="pair">
        <div class="column">
          <ByCategory peak={answer.peak} />
          {isReadable(answer.source) && <Findings pick={pick} />}
        </div>
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
