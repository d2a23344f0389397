import { RULES } from "../../api/contract";
import { useRemote } from "../../api/remote";
import { address } from "../../api/request";
import type { AdviceAnswer, Holder, Judgement, PeakHolders } from "../../api/types";
import { adviceHeadline, ruleName, unfound } from "../../state/advice";
import { alone, picked } from "../../state/app";
import { percent, type Unit, unitFor, withUnit } from "../../state/bytes";
import { categoryLabel } from "../../state/categories";
import { moduleLabel, titleText } from "../../state/names";
import { counted, grouped } from "../../state/numbers";
import { shortLine } from "../allocator/state_panel";
import { Bytes } from "../amount";
import { Category } from "../category";
import { HowToRecord } from "../monitored/only_figures";
import { Name } from "../name";
import { OtherRanks } from "../other_ranks";
import { Headline } from "../sentence";
import { FailureState, Loading } from "../states";
import { Heads } from "../table";
import { FindingCard } from "./finding_card";

/** What of the memory could be saved, each with its evidence; then who fills the peak, and what was fine or not judged. */
export function Advice() {
  const pick = picked.value!;
  const answer = useRemote<AdviceAnswer>(address("advice", pick), 0, ["step"]);
  if (answer.failure) return <FailureState failure={answer.failure} />;
  const data = answer.data;
  if (!data) return <Loading what="the advice" />;
  return (
    <div class={answer.stale ? "stale" : undefined} aria-busy={answer.stale}>
      <Headline pieces={adviceHeadline(data, alone.value)} />
      <p class="lead" data-testid="advice-lead">
        {lead(data)}
      </p>
      <OtherRanks />
      {data.findings.map((finding) => (
        <FindingCard key={finding.kind} finding={finding} />
      ))}
      {data.peak && <PeakCard peak={data.peak} />}
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

/** Who fills the peak: parts that sum to it. */
function PeakCard({ peak }: { peak: PeakHolders }) {
  const unit = unitFor(peak.bytes);
  const own = peak.by !== "category" && peak.holders.some((holder) => !holder.is_name);
  return (
    <section class="card" data-testid="peak-holders" aria-label="Who fills the peak" tabIndex={0}>
      <h2>
        Who fills the peak of {alone.value ? "the whole window" : `step ${peak.step}`}: {withUnit(peak.bytes)}
      </h2>
      {own && (
        <p class="muted">
          Parameters, gradients and optimizer state are rows of their own, whichever {peak.by} allocated them. The rest is by {peak.by}.
        </p>
      )}
      <table class="plain evidence holders">
        <Heads columns={[own ? "what" : peak.by, { number: unit.name }, { number: "share" }, { text: "category", look: "after-number" }, { number: "blocks" }]} />
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
  const label = moduleLabel(name);
  return (
    <tr data-testid="holder" data-key={name}>
      <th scope="row">{is_name ? <Name text={shortLine(label)} title={label} /> : <span>{titleText(categoryLabel(name))}</span>}</th>
      <td class="number">
        <Bytes bytes={bytes} unit={unit} />
      </td>
      <td class="number">{percent(bytes, of)}</td>
      <td class="muted after-number category">{is_name && <Category of={category} />}</td>
      <td class="number">{grouped(blocks)}</td>
    </tr>
  );
}

/** The rules without a finding: what each looked for, and what it saw, or what it lacked. */
function Judgements({ judgements, alone }: { judgements: Judgement[]; alone: boolean }) {
  if (judgements.length === 0) return null;
  return (
    <section class="card" data-testid="judgements" aria-label="Rules without a finding">
      <h2>{alone ? "Looked for" : "Also looked for"}</h2>
      <table class="plain judgements">
        <tbody>
          {judgements.map(({ kind, verdict, why }) => (
            <tr key={kind} data-testid="judgement" data-key={kind} data-verdict={verdict}>
              <td class="verdict">
                <span class={verdict === "fine" ? "pill well" : "pill"}>{verdict}</span>
              </td>
              <th scope="row">
                <div>{ruleName(kind)}</div>
                <div class="muted looks">{RULES[kind]?.looks ?? ""}</div>
              </th>
              <td class="breaking">{titleText(why)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}
