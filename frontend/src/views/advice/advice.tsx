import type { AdviceAnswer } from "../../api/types";
import { address } from "../../api/request";
import { useRemote } from "../../api/remote";
import { alone, picked } from "../../state/app";
import { adviceHeadline, unfound } from "../../state/advice";
import { counted } from "../../state/numbers";
import { HowToRecord } from "../monitored/only_figures";
import { OtherRanks } from "../other_ranks";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { FindingCard } from "./finding_card";
import { Judgements } from "./judgements";
import { PeakCard } from "./peak_card";

/** What of the memory could be saved, each with its evidence; then what was looked at and found fine, or not judged. */
export function Advice() {
  const pick = picked.value!;
  const answer = useRemote<AdviceAnswer>(address("advice", pick), 0, ["step"]);
  if (answer.failure) return <FailureState failure={answer.failure} onRetry={answer.retry} />;
  const data = answer.data;
  if (!data) return <Loading what="the advice" />;
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      <Headline pieces={adviceHeadline(data, alone.value)} />
      <p class="lead" data-testid="advice-lead">
        {lead(data)}
      </p>
      <OtherRanks />
      {data.peak && <PeakCard peak={data.peak} />}
      {data.findings.map((finding) => (
        <FindingCard key={finding.kind} finding={finding} />
      ))}
      <Judgements judgements={unfound(data)} alone={data.findings.length === 0} />
      {data.watched_steps > 0 && <HowToRecord />}
    </div>
  );
}

function lead(data: AdviceAnswer): string {
  const levels = new Set(data.findings.map((finding) => finding.level));
  const said = [
    ...(levels.has("problem") ? ["A problem wastes memory."] : []),
    ...(levels.has("option") ? ["An option saves memory at a price: time, numerics or a code change."] : []),
  ];
  const fine = data.judgements.filter((one) => one.verdict === "fine").length;
  const open = data.judgements.filter((one) => one.verdict === "not judged").length;
  if (said.length === 0) said.push(`${counted(fine, "rule")} found nothing to fix.`);
  if (open > 0) said.push(`${counted(open, "rule")} could not be judged: this recording lacks what ${open === 1 ? "it needs" : "they need"}.`);
  return said.join(" ");
}
